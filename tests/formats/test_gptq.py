"""GPTQ: golden words, both versions, act-order files, and configs with rules, ours and other tools'."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from independent import dequantize
from samples import random_weight

from quantkit import __version__
from quantkit.errors import CheckpointError, UnsupportedScheme
from quantkit.formats import FORMATS, Format, reader_of
from quantkit.formats.gptq import Gptq
from quantkit.ops.affine import dequantize as dequantize_here
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import PER_CHANNEL, Scheme

FORMAT = FORMATS["gptq"]
SECOND = Gptq(zero_offset=0)
TAILS = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
NAMES = [f"model.layers.{block}.{tail}" for block in (0, 1, 11) for tail in TAILS]


def signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def ramp(scheme: Scheme, zeros: list[int]) -> QuantizedWeight:
    """codes[n, k] = n + k, scale[n, 0] = n + 1."""
    rows = torch.arange(len(zeros), dtype=torch.uint8)[:, None]
    return QuantizedWeight(
        codes=rows + torch.arange(8, dtype=torch.uint8),
        scale=(rows + 1).to(torch.float16),
        zero_point=torch.tensor(zeros, dtype=torch.uint8)[:, None],
        scheme=scheme,
    )


def test_the_words_of_a_small_symmetric_weight() -> None:
    tensors = FORMAT.pack("m", ramp(Scheme(4, 8), [8] * 8))

    # column n, from the lowest four bits: n, n + 1, ..., n + 7
    codes = [0x76543210, 0x87654321, 0x98765432, 0xA9876543, 0xBA987654, 0xCBA98765, 0xDCBA9876, 0xEDCBA987]
    assert tensors["m.qweight"].tolist() == [[signed(word) for word in codes]]
    assert tensors["m.qzeros"].tolist() == [[0x77777777]]
    assert tensors["m.scales"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert tensors["m.g_idx"].tolist() == [0] * 8
    assert tensors["m.qzeros"].numpy().tobytes().hex() == "77777777"
    assert SECOND.pack("m", ramp(Scheme(4, 8), [8] * 8))["m.qzeros"].tolist() == [[signed(0x88888888)]]


def test_the_words_of_asymmetric_zero_points() -> None:
    weight = ramp(Scheme(4, 8, symmetric=False), [1, 2, 3, 4, 5, 6, 7, 15])

    assert FORMAT.pack("m", weight)["m.qzeros"].tolist() == [[signed(0xE6543210)]]
    assert SECOND.pack("m", weight)["m.qzeros"].tolist() == [[signed(0xF7654321)]]


def test_the_words_of_eight_bits() -> None:
    one = ramp(Scheme(8, 8), [128] * 4)
    two = QuantizedWeight(one.codes, one.scale.repeat(1, 2), one.zero_point.repeat(1, 2), Scheme(8, 4))

    tensors = FORMAT.pack("m", two)

    assert tensors["m.qweight"].tolist() == [
        [signed(word) for word in (0x03020100, 0x04030201, 0x05040302, 0x06050403)],
        [signed(word) for word in (0x07060504, 0x08070605, 0x09080706, 0x0A090807)],
    ]
    assert tensors["m.qzeros"].tolist() == [[0x7F7F7F7F], [0x7F7F7F7F]]
    assert tensors["m.g_idx"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_of_zero_is_refused_by_name(bits: int) -> None:
    q = random_weight(Scheme(bits, 32, symmetric=False), 32, 64, dtype=torch.float16, least_zero=1)
    q.zero_point[5, 1] = 0

    with pytest.raises(UnsupportedScheme, match=r"`x` has a zero point of 0: .* wraps into its neighbour") as error:
        FORMAT.pack("x", q)
    assert "--symmetric" in error.value.hint
    assert torch.equal(SECOND.unpack("x", SECOND.pack("x", q), q.scheme).zero_point, q.zero_point)


@pytest.mark.parametrize("bits", [4, 8])
def test_asymmetric_schemes_are_accepted_only_without_a_zero_point_of_zero(bits: int) -> None:
    scheme = Scheme(bits, 32, symmetric=False)

    FORMAT.check(scheme, (64, 64), least_zero=1)
    FORMAT.check(Scheme(bits, 32), (64, 64))
    SECOND.check(scheme, (64, 64))
    with pytest.raises(UnsupportedScheme, match="stores zero points minus one") as error:
        FORMAT.check(scheme, (64, 64))
    assert error.value.hint == "use `--symmetric`, or `--format compressed-tensors` or `awq`"


@pytest.mark.parametrize(
    ("shape", "message"),
    [((64, 80), "80 input features are not a multiple of 32"), ((72, 64), "72 output features are not a multiple")],
)
def test_sides_that_loaders_refuse_are_refused(shape: tuple[int, int], message: str) -> None:
    with pytest.raises(UnsupportedScheme, match=message):
        FORMAT.check(Scheme(4, PER_CHANNEL), shape)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_that_readers_take_differently_is_refused(bits: int) -> None:
    scheme = Scheme(bits, 32, symmetric=False)
    tensors = FORMAT.pack("x", random_weight(scheme, 32, 64, dtype=torch.float16, least_zero=1))
    tensors["x.qzeros"][1, 2] = -1  # every field is full

    with pytest.raises(CheckpointError, match=f"`x.qzeros` stores {scheme.qmax}, .* of 0 or of {scheme.qmax + 1}"):
        FORMAT.unpack("x", tensors, scheme)
    assert SECOND.unpack("x", tensors, scheme).zero_point.max() == scheme.qmax


@pytest.mark.parametrize(("fmt", "field"), [(FORMAT, 8), (FORMAT, 15), (SECOND, 7)])
def test_symmetric_zero_points_are_in_the_middle(fmt: Format, field: int) -> None:
    scheme = Scheme(4, 32)
    tensors = fmt.pack("x", random_weight(scheme, 32, 64, dtype=torch.float16))
    tensors["x.qzeros"][0, 0] = signed(field * 0x11111111)

    with pytest.raises(CheckpointError, match=r"`x\.qzeros` holds zero points other than 8"):
        fmt.unpack("x", tensors, scheme)


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_second_version_is_read_as_such(symmetric: bool) -> None:
    scheme = Scheme(4, 32, symmetric)
    q = random_weight(scheme, 32, 64, dtype=torch.float16)
    config = {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 4, "group_size": 32, "sym": symmetric}
    reader = reader_of(config)
    assert reader is not None

    tensors = SECOND.pack("x", q)

    assert SECOND.config({"x": scheme})["checkpoint_format"] == "gptq_v2"
    assert reader.scheme_of(config)("x") == scheme
    assert torch.equal(reader.unpack("x", tensors, scheme).zero_point, q.zero_point)
    theirs = dequantize(config, {name: t.numpy() for name, t in tensors.items()}, "x")
    assert np.array_equal(theirs, dequantize_here(q).numpy())
    with pytest.raises(CheckpointError, match="`gptq_v2` has other zero points"):
        FORMAT.scheme_of(config)


@pytest.mark.parametrize("bits", [4, 8])
def test_an_act_order_file_is_read_with_its_groups(bits: int) -> None:
    scheme = Scheme(bits, 16, symmetric=False)
    tensors = FORMAT.pack("x", random_weight(scheme, 32, 64, dtype=torch.float16, least_zero=1))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    tensors["x.g_idx"] = tensors["x.g_idx"][order].contiguous()

    q = FORMAT.unpack("x", tensors, scheme, (32, 64))

    assert q.g_idx is not None and torch.equal(q.g_idx, tensors["x.g_idx"])
    config = {"quant_method": "gptq", "desc_act": True}
    theirs = dequantize(config, {name: t.numpy() for name, t in tensors.items()}, "x")
    assert np.array_equal(theirs, dequantize_here(q).numpy())
    with pytest.raises(UnsupportedScheme, match="group index") as error:
        FORMAT.pack("x", q)
    assert "quantkit dequantize" in error.value.hint


def test_a_file_without_an_index_has_consecutive_groups() -> None:
    q = random_weight(Scheme(4, 16), 32, 64, dtype=torch.float16)
    tensors = FORMAT.pack("x", q)
    del tensors["x.g_idx"]

    back = FORMAT.unpack("x", tensors, q.scheme)

    assert torch.equal(back.codes, q.codes)
    assert back.g_idx is None


@pytest.mark.parametrize(("position", "value"), [(0, -1), (63, 4)])
def test_an_index_beyond_the_groups_is_refused(position: int, value: int) -> None:
    q = random_weight(Scheme(4, 16), 32, 64, dtype=torch.float16)
    tensors = FORMAT.pack("x", q)
    tensors["x.g_idx"][position] = value

    with pytest.raises(CheckpointError, match=r"`x\.g_idx` names group .* there are 4"):
        FORMAT.unpack("x", tensors, q.scheme)


def model(**by_tail: Scheme | None) -> dict[str, Scheme | None]:
    return {name: by_tail.get(name.rpartition(".")[2], Scheme(4, 64)) for name in NAMES} | {"lm_head": None}


def test_the_config_and_the_file_beside_it() -> None:
    config = FORMAT.config(model())

    assert config == {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": 4,
        "group_size": 64,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "true_sequential": True,
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"quantkit:{__version__}"]},
    }
    assert FORMAT.files(config) == {"quantize_config.json": config}
    assert FORMAT.config(model(), fp8_cache=True) == config


def test_rules_are_short_where_whole_kinds_differ() -> None:
    config = FORMAT.config(model(o_proj=None, down_proj=Scheme(8, 32)))

    assert config["dynamic"] == {r"-:.*\.o_proj$": {}, r"+:.*\.down_proj$": {"bits": 8, "group_size": 32}}


def test_rules_name_single_linears_in_full() -> None:
    config = FORMAT.config(model() | {"model.layers.1.mlp.down_proj": None})

    assert config["dynamic"] == {r"-:model\.layers\.1\.mlp\.down_proj$": {}}


def test_rules_also_match_the_modules_that_engines_build() -> None:
    attention = dict.fromkeys(("q_proj", "k_proj", "v_proj"), Scheme(8, 64))
    rules = [key.removeprefix("+:") for key in FORMAT.config(model(**attention))["dynamic"]]

    assert any(re.match(rule, "model.layers.1.self_attn.qkv_proj") for rule in rules)
    assert not any(re.match(rule, "model.layers.1.self_attn.o_proj") for rule in rules)
    assert not any(re.match(rule, "model.layers.1.mlp.gate_up_proj") for rule in rules)


def test_rules_for_experts_match_the_module_that_holds_them() -> None:
    experts = {f"model.layers.{block}.mlp.experts.{e}.down_proj": Scheme(8, 32) for block in (0, 1) for e in (0, 1)}
    rules = [key.removeprefix("+:") for key in FORMAT.config(model() | experts)["dynamic"]]

    assert any(re.match(rule, "model.layers.1.mlp.experts") for rule in rules)
    assert not any(re.match(rule, "model.layers.1.mlp.down_proj") for rule in rules)


choices = st.sampled_from([None, Scheme(4, 64), Scheme(8, 64), Scheme(8, PER_CHANNEL), Scheme(4, 32)])


@settings(deadline=None)
@given(st.lists(choices, min_size=len(NAMES), max_size=len(NAMES)))
def test_a_written_config_reads_back(assigned: list[Scheme | None]) -> None:
    schemes = {**dict(zip(NAMES, assigned, strict=True)), NAMES[0]: Scheme(4, 64), "lm_head": None}

    scheme_of = FORMAT.scheme_of(FORMAT.config(schemes))

    assert {name: scheme_of(name) for name in schemes} == schemes


def test_mixed_symmetry_cannot_be_said() -> None:
    with pytest.raises(UnsupportedScheme, match="symmetric and asymmetric"):
        FORMAT.config(model(o_proj=Scheme(4, 64, symmetric=False)))


def other(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True} | changes


def test_another_tools_config_is_read() -> None:
    scheme_of = FORMAT.scheme_of(
        other(
            group_size=-1,
            checkpoint_format=None,
            damp_percent=0.01,
            is_marlin_format=False,
            dynamic={
                r"-:.*\.gate$": {},
                r"+:.*\.layers\.1\..*": {"bits": 8, "group_size": 64, "desc_act": False},
                r".*\.down_proj$": {"sym": False},
            },
        )
    )

    assert scheme_of("model.layers.0.mlp.up_proj") == Scheme(4, PER_CHANNEL)
    assert scheme_of("model.layers.1.mlp.down_proj") == Scheme(8, 64)  # the first rule that matches
    assert scheme_of("model.layers.0.mlp.down_proj") == Scheme(4, PER_CHANNEL, symmetric=False)
    assert scheme_of("model.layers.1.mlp.gate") is None
    assert scheme_of("lm_head") is None
    assert FORMAT.scheme_of(other(lm_head=True))("lm_head") == Scheme(4, 128)


def test_a_list_of_modules_leaves_out_the_others() -> None:
    scheme_of = FORMAT.scheme_of(other(modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.up_proj"]]))

    assert scheme_of("model.layers.0.mlp.up_proj") == Scheme(4, 128)
    assert scheme_of("model.layers.0.mlp.down_proj") is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (other(checkpoint_format="marlin"), "checkpoint_format `marlin` is not read"),
        (other(checkpoint_format="gptq_p"), "checkpoint_format `gptq_p` is not read"),
        (other(checkpoint_format=["gptq"]), "is not read"),
        (other(format="bitblas"), "checkpoint_format `bitblas` is not read"),
        (other(is_marlin_format=True), "checkpoint_format `marlin` is not read"),
        (other(pack_dtype="int16"), "pack_dtype `int16` is not read"),
        (other(bits=3), "3 bits are not supported"),
        (other(bits=True), "`bits` is True, not a number"),
        (other(bits=None), "`bits` is None, not a number"),
        (other(group_size="128"), "`group_size` is '128', not a number"),
        (other(group_size=0), "group size 0 is not a size"),
        (other(sym=1), "`symmetry` is 1, not a flag"),
        (other(quant_method="awq"), "quant_method `awq` is not gptq"),
        (other(dynamic=[]), "`dynamic` is .*, not a dict"),
        (other(dynamic={"+:([": {}}), "not a regular expression"),
        (other(dynamic={"+:x": 8}), "`dynamic` gives `.:x` 8, not a dict"),
        (other(dynamic={"+:x": {"bits": 2}}), "2 bits are not supported"),
        (other(modules_in_block_to_quantize=[[3]]), "holds 3, which is no name"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        FORMAT.scheme_of(config)
