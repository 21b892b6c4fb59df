"""AWQ: golden words, names that readers match by parts, and configs, ours and other tools'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import random_weight

from quantkit.errors import CheckpointError, UnsupportedScheme
from quantkit.formats import FORMATS
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import PER_CHANNEL, Scheme

FORMAT = FORMATS["awq"]
UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"


def signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def test_the_words_of_a_small_weight() -> None:
    features = torch.arange(8, dtype=torch.uint8)
    q = QuantizedWeight(
        codes=torch.stack([features, 15 - features], dim=1),
        scale=(features[:, None] + 1).to(torch.float16),
        zero_point=features[:, None] + 8,
        scheme=Scheme(4, 2, symmetric=False),
    )

    tensors = FORMAT.pack("m", q)

    # features 0 2 4 6 1 3 5 7, from the lowest four bits
    assert tensors["m.qweight"].tolist() == [[signed(0x75316420)], [signed(0x8ACE9BDF)]]
    assert tensors["m.qzeros"].tolist() == [[signed(0xFDB9ECA8)]]
    assert tensors["m.scales"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert tensors["m.qweight"].numpy().tobytes().hex(" ") == "20 64 31 75 df 9b ce 8a"


def test_symmetric_weights_hold_their_zero_points() -> None:
    tensors = FORMAT.pack("m", random_weight(Scheme(4, 8), 16, 24, dtype=torch.float16))

    assert tensors["m.qzeros"].tolist() == [[signed(0x88888888)] * 2] * 3


@pytest.mark.parametrize(
    ("scheme", "shape", "message"),
    [
        (Scheme(8, 32), (64, 64), "8-bit codes have no place in `awq`"),
        (Scheme(4, 32), (60, 64), "60 output features are not a multiple of 8"),
    ],
)
def test_what_has_no_place_is_refused(scheme: Scheme, shape: tuple[int, int], message: str) -> None:
    with pytest.raises(UnsupportedScheme, match=message):
        FORMAT.check(scheme, shape)
    with pytest.raises(UnsupportedScheme, match=message):
        FORMAT.pack("x", random_weight(scheme, *shape, dtype=torch.float16))


def test_any_zero_point_and_any_input_width_that_groups_tile_has_a_place() -> None:
    FORMAT.check(Scheme(4, 4, symmetric=False), (8, 12), least_zero=0)
    FORMAT.check(Scheme(4, PER_CHANNEL), (8, 13))


def test_the_config() -> None:
    assert FORMAT.config({UP: Scheme(4, 64), DOWN: None}) == {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
        "modules_to_not_convert": [DOWN, "lm_head"],
    }
    assert FORMAT.files(FORMAT.config({UP: Scheme()})) == {}
    named = FORMAT.config({UP: Scheme(), "language_model.lm_head": None})["modules_to_not_convert"]
    assert named == ["language_model.lm_head"]


def test_several_schemes_cannot_be_said() -> None:
    with pytest.raises(UnsupportedScheme, match="one scheme for all linears, and these have 2: 4-bit, group 128"):
        FORMAT.config({UP: Scheme(), DOWN: Scheme(4, 64)})


def test_a_kept_name_that_is_part_of_a_packed_one_is_refused() -> None:
    schemes = {"model.layers.1.mlp.gate": None, "model.layers.1.mlp.gate_proj": Scheme()}

    with pytest.raises(UnsupportedScheme, match=r"`model.layers.1.mlp.gate` stays in 16 bit and is part of the name"):
        FORMAT.config(schemes)
    FORMAT.config({"model.layers.1.mlp.up_proj": None, "model.layers.11.mlp.up_proj": Scheme()})


def other(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"} | changes


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (other(), Scheme(4, 128, symmetric=False)),
        (other(version="GEMM", zero_point=False), Scheme(4, 128)),
        (other(group_size=-1, modules_to_not_convert=None), Scheme(4, PER_CHANNEL, symmetric=False)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True}, Scheme(4, 64, symmetric=False)),
        (other(modules_to_not_convert=["mlp.gate.", "down_proj"]), Scheme(4, 128, symmetric=False)),
        (other(modules_to_not_convert=["mlp"]), None),
    ],
)
def test_another_tools_config_is_read(config: dict[str, Any], expected: Scheme | None) -> None:
    assert FORMAT.scheme_of(config)(UP) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (other(version="gemv"), "AWQ version `gemv` is not read"),
        (other(version=None), "AWQ version `None` is not read"),
        (other(bits=8), "8 bits are not read"),
        (other(bits=None), "None bits are not read"),
        (other(group_size=None), "`group_size` is None, not a number"),
        (other(zero_point="yes"), "`zero_point` is 'yes', not true or false"),
        (other(quant_method="gptq"), "quant_method `gptq` is not awq"),
        (other(modules_to_not_convert="lm_head"), "not a list"),
        (other(modules_to_not_convert=[None]), "holds None, which is no name"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        FORMAT.scheme_of(config)


def test_symmetric_zero_points_are_in_the_middle() -> None:
    q = random_weight(Scheme(4, 8, symmetric=False), 16, 24, dtype=torch.float16)
    tensors = FORMAT.pack("x", q)

    with pytest.raises(CheckpointError, match=r"`x\.qzeros` holds zero points other than 8"):
        FORMAT.unpack("x", tensors, Scheme(4, 8))


def test_scales_in_bfloat16_are_read() -> None:
    q = random_weight(Scheme(4, 8), 16, 24, dtype=torch.float16)
    tensors = FORMAT.pack("x", q)
    tensors["x.scales"] = tensors["x.scales"].bfloat16()

    assert torch.equal(FORMAT.unpack("x", tensors, q.scheme).scale, q.scale.bfloat16())
