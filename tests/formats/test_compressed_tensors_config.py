"""The quantization_config: what we write is accepted and read back; other tools' are read or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import CheckpointError
from quantkit.formats import FORMATS
from quantkit.scheme import PER_CHANNEL, Scheme

FORMAT = FORMATS["compressed-tensors"]
ATTENTION = [f"self_attn.{part}_proj" for part in "qkvo"]
MLP = [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
NAMES = [f"model.layers.{block}.{part}" for block in range(3) for part in ATTENTION + MLP]


def model(**by_tail: Scheme | None) -> dict[str, Scheme | None]:
    return {name: by_tail.get(name.rpartition(".")[2], Scheme(4, 64)) for name in NAMES} | {"lm_head": None}


def test_one_scheme_is_one_group_of_every_linear() -> None:
    config = FORMAT.config(model(o_proj=None))

    assert config == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "version": "0.20.0",
        "ignore": [f"model.layers.{block}.self_attn.o_proj" for block in range(3)] + ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 64,
                    "dynamic": False,
                    "actorder": None,
                    "observer": "minmax",
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
    }


def test_a_tied_head_is_ignored_though_it_has_no_tensor() -> None:
    assert FORMAT.config({NAMES[0]: Scheme()})["ignore"] == ["lm_head"]
    assert FORMAT.config({NAMES[0]: Scheme(), "language_model.lm_head": None})["ignore"] == ["language_model.lm_head"]


def test_mixed_schemes_share_no_target_and_use_no_class() -> None:
    config = FORMAT.config(model(down_proj=Scheme(8, PER_CHANNEL)))

    first, second = config["config_groups"].values()
    assert second["targets"] == [r"re:.*\.down_proj$"]
    assert second["weights"]["strategy"] == "channel"
    assert "group_size" not in second["weights"]
    assert len(first["targets"]) == 6
    assert "Linear" not in first["targets"]


def test_a_single_linear_of_many_is_named_in_full() -> None:
    config = FORMAT.config(model() | {NAMES[6]: Scheme(8, 64)})

    first, second = config["config_groups"].values()
    assert second["targets"] == [NAMES[6]]
    assert [target for target in first["targets"] if "down" in target] == [NAMES[13], NAMES[20]]


choices = st.sampled_from([None, Scheme(4, 64), Scheme(4, 32, False), Scheme(8, 64), Scheme(8, PER_CHANNEL)])


@settings(deadline=None)
@given(st.lists(choices, min_size=len(NAMES), max_size=len(NAMES)))
def test_a_written_config_reads_back(assigned: list[Scheme | None]) -> None:
    schemes = dict(zip(NAMES, assigned, strict=True)) | {"lm_head": None}

    scheme_of = FORMAT.scheme_of(FORMAT.config(schemes, fp8_cache=True))

    assert {name: scheme_of(name) for name in schemes} == schemes


@pytest.mark.parametrize("down", [Scheme(4, 64), Scheme(8, PER_CHANNEL), Scheme(4, 32, False), None])
def test_the_library_accepts_the_config_and_gives_every_linear_the_same_scheme(down: Scheme | None) -> None:
    library = pytest.importorskip("compressed_tensors")
    import torch

    schemes = model(down_proj=down)
    skeleton = torch.nn.Module()
    for name in schemes:
        parent = skeleton
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.add_module(leaf, torch.nn.Linear(64, 64, dtype=torch.bfloat16))

    config = library.quantization.QuantizationConfig(**FORMAT.config(schemes))
    library.quantization.apply_quantization_config(skeleton, config, show_progress=False)

    found: dict[str, Scheme | None] = {}
    for name in schemes:
        theirs = getattr(skeleton.get_submodule(name), "quantization_scheme", None)
        found[name] = theirs and Scheme(
            theirs.weights.num_bits, theirs.weights.group_size or -1, theirs.weights.symmetric
        )
    assert found == schemes


@pytest.mark.parametrize("packed", [True, False])
def test_scales_of_a_cache_are_announced_as_the_library_parses_them(packed: bool) -> None:
    library = pytest.importorskip("compressed_tensors")
    schemes = model() if packed else dict.fromkeys(NAMES)

    config = FORMAT.config(schemes, fp8_cache=True)
    theirs = library.quantization.QuantizationConfig(**config)

    assert config["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": True,
    }
    cache = theirs.kv_cache_scheme
    assert (cache.num_bits, cache.type, cache.strategy, cache.dynamic, cache.symmetric) == (
        8,
        "float",
        "tensor",
        False,
        True,
    )
    assert (theirs.format, len(theirs.config_groups)) == (("pack-quantized", 1) if packed else ("dense", 0))
    assert theirs.quantization_status.value == ("compressed" if packed else "frozen")


def test_a_cache_alone_leaves_every_linear_plain() -> None:
    config = FORMAT.config(dict.fromkeys(NAMES), fp8_cache=True)

    assert config["config_groups"] == {}
    assert config["ignore"] == [*NAMES, "lm_head"]
    assert FORMAT.scheme_of(config)(NAMES[0]) is None
    assert FORMAT.scheme_of({"quant_method": "compressed-tensors", "format": "dense"})(NAMES[0]) is None


def test_the_scales_of_a_cache_stand_in_the_attention_module() -> None:
    assert FORMAT.cache_specs("a.self_attn") == {
        "a.self_attn.k_scale": ("F32", (1,)),
        "a.self_attn.v_scale": ("F32", (1,)),
    }


def group(**weights: Any) -> dict[str, Any]:
    return {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | weights,
    }


def other(*groups: dict[str, Any], **top: Any) -> dict[str, Any]:
    named = {f"group_{index}": each for index, each in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": named} | top


def test_another_tools_config_is_read() -> None:
    scheme_of = FORMAT.scheme_of(
        other(
            group(actorder="weight", block_structure=None, observer_kwargs={}, scale_dtype=None),
            group(num_bits=8, group_size=None, strategy="channel") | {"targets": ["re:.*v_proj"]},
            group(symmetric=False) | {"targets": ["model.layers.0.self_attn.v_proj"], "format": "pack-quantized"},
            group(group_size=-1, strategy=None) | {"targets": [r"re:.*\.up_proj$"]},
            ignore=["lm_head", r"re:.*mlp\.gate$"],
            kv_cache_scheme={"num_bits": 8, "type": "float"},
            sparsity_config={"format": "dense"},
        )
    )

    assert scheme_of("model.layers.1.self_attn.q_proj") == Scheme(4, 32)
    assert scheme_of("model.layers.1.self_attn.v_proj") == Scheme(8, PER_CHANNEL)
    assert scheme_of("model.layers.0.self_attn.v_proj") == Scheme(4, 32, symmetric=False)
    assert scheme_of("model.layers.0.mlp.up_proj") == Scheme(4, PER_CHANNEL)
    assert scheme_of("lm_head") is None
    assert scheme_of("model.layers.0.mlp.gate") is None


def test_a_linear_that_no_target_names_is_not_packed() -> None:
    scheme_of = FORMAT.scheme_of(other(group() | {"targets": ["re:.*q_proj"]}))

    assert scheme_of("model.layers.0.self_attn.k_proj") is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (other(group(), format="int-quantized"), "format `int-quantized`"),
        (other(group(), format=None), "format `None`"),
        (other(group() | {"format": "marlin-24"}), "format `marlin-24`"),
        (other(group(actorder="group")), "actorder `group`"),
        (other(group(actorder=True)), "actorder `True`"),
        (other(group(num_bits=3)), "3 bits are not supported"),
        (other(group(num_bits=2)), "2 bits are not supported"),
        (other(group(type="float")), "holds float weights"),
        (other(group(strategy="tensor", group_size=None)), "strategy `tensor`"),
        (other(group(strategy="block", block_structure=[128, 128])), "strategy `block`"),
        (other(group(group_size=None)), "strategy `group` with group size None"),
        (other(group(group_size=0)), "group size 0 is not a size"),
        (other(group() | {"input_activations": {"num_bits": 8}}), "quantizes activations"),
        (other({"targets": ["Linear"], "weights": None}), "describes no weights"),
        (other(group() | {"targets": ["re:(["]}), "not a regular expression"),
        (other(group(), quant_method="gptq"), "quant_method `gptq`"),
        (other(group(), quantization_status="frozen"), "status `frozen`"),
        (other(group(), sparsity_config={"format": "sparse-24-bitmask"}), "sparse weights"),
        (other(group(), transform_config={"config_groups": {"u": {}}}), "rotated weights"),
        (other(group(), sparsity_config="dense"), "`sparsity_config` is 'dense', not a dict"),
        (other(group(), transform_config=["u"]), "`transform_config` is .*, not a dict"),
        (other(group(), ignore="lm_head"), "`ignore` is 'lm_head', not a list"),
        (other(group(), ignore=["lm_head", ["x"]]), "`ignore` holds .'x'., which is no name"),
        (other(group() | {"targets": 5}), "`targets` is 5, not a list"),
        (other(group() | {"targets": [None, 3]}), "`targets` holds None, which is no name"),
        (other(config_groups=[group()]), "`config_groups` is .*, not a dict"),
        (other(group(symmetric="no")), "`symmetric` 'no', which is neither true nor false"),
        (other(**{"config_groups": {"W4A16": ["Linear"]}}), "group `W4A16` describes no weights"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        FORMAT.scheme_of(config)
