"""GPTQ and AWQ artifacts, one damage at a time: the check that is for it fails, and names the place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verify.damage import (
    Row,
    as_dtype,
    as_shape,
    both,
    damaged,
    drop,
    every_number,
    fill,
    flip,
    overwrite,
    put,
    remove,
    set_number,
    tensor,
)
from verify.judged import require_found, require_right

Make = Callable[..., Any]

K, DOWN = "model.layers.1.self_attn.k_proj", "model.layers.0.mlp.down_proj"
EIGHTS, SEVENS, FIFTEENS = 0x88888888 - 2**32, 0x77777777, -1  # zero points in words


def rotated(word: int) -> int:
    """A word whose eight codes each moved by one field."""
    turned = (word << 4 | (word & 0xFFFFFFFF) >> 28) & 0xFFFFFFFF
    return turned - 2**32 if turned >= 2**31 else turned


GPTQ = [
    Row("every code", flip(f"{K}.qweight"), "weights", f"{K}.weight", "differs from the source by"),
    Row("codes of one row", fill(f"{DOWN}.qweight", 0, 64 * 48), "codes weights", DOWN, "one code only in 64 of 64"),
    Row("a scale of 0", set_number(f"{K}.scales", 5, 0.0), "scales", K, "has 1 of 64 scales"),
    Row("a negative scale", set_number(f"{K}.scales", 5, -1.0), "scales", K, "such as -1.0"),
    Row("a zero point beside the middle", set_number(f"{K}.qzeros", 0, 0x77777776), "zero-points", K, "other than 8"),
    Row("zero points of version 2", set_number(f"{K}.qzeros", 0, EIGHTS), "zero-points", K, "other than 8"),
    Row("zero points that wrap", set_number(f"{K}.qzeros", 0, FIFTEENS), "zero-points", K, "other than 8"),
    Row("scales removed", drop(f"{K}.scales"), "names", f"{K}.scales", "is missing"),
    Row("zero points removed", drop(f"{K}.qzeros"), "names", f"{K}.qzeros", "is missing"),
    Row(
        "scales as integers", as_dtype(f"{K}.scales", "I16"), "dtypes", f"{K}.scales", "is I16, and the format has F16"
    ),
    Row("zero points of other sides", as_shape(f"{K}.qzeros", 4, 2), "shapes", f"{K}.qzeros", "asks for [2, 4]"),
    Row("codes of other sides", as_shape(f"{K}.qweight", 32, 8), "shapes", f"{K}.qweight", "asks for [8, 32]"),
    Row("a group that there is not", set_number(f"{K}.g_idx", 0, 2), "codes", K, "names group 0 to 2, and there are 2"),
    Row("a group below 0", set_number(f"{K}.g_idx", 9, -1), "codes", K, "names group -1 to 1"),
    Row(
        "groups swapped",
        every_number(f"{K}.g_idx", lambda group: 1 - group),
        "codes",
        K,
        "are not consecutive, and the config says `desc_act: false`",
    ),
    Row("groups as floats", as_dtype(f"{K}.g_idx", "F32"), "dtypes", f"{K}.g_idx", "is F32, and the format has I32"),
    Row(
        "no quantize_config.json",
        remove("quantize_config.json"),
        "files",
        "quantize_config.json",
        "has no `quantize_config.json`",
    ),
    Row(
        "quantize_config.json no JSON", overwrite("quantize_config.json", "{"), "files", "quantize_config.json", "JSON"
    ),
    Row(
        "quantize_config.json of other groups",
        put("quantize_config.json", "group_size", value=64),
        "files",
        "quantize_config.json",
        "disagrees with `quantization_config` of config.json in `group_size`",
    ),
    Row(
        "config.json of other groups",
        put("config.json", "quantization_config", "group_size", value=64),
        "files shapes",
        f"{K}.scales",
        "is [2, 32], and the scheme asks for [1, 32]",
    ),
    Row(
        "config.json of other bits",
        put("config.json", "quantization_config", "bits", value=3),
        "files config",
        "config.json",
        "3",
    ),
]
AWQ = [
    Row("every code", flip(f"{K}.qweight"), "weights", f"{K}.weight", "differs from the source by"),
    Row("holes in the codes", fill(f"{DOWN}.qweight", 0, 96 * 32), "codes weights", DOWN, "one code only in 64 of 64"),
    Row("codes in another order", every_number(f"{DOWN}.qweight", rotated), "weights", f"{DOWN}.weight", "differs"),
    Row("a scale of 0", set_number(f"{K}.scales", 5, 0.0), "scales", K, "has 1 of 64 scales"),
    Row("scales removed", drop(f"{K}.scales"), "names", f"{K}.scales", "is missing"),
    Row("every zero point", flip(f"{K}.qzeros", 0x88), "weights", f"{K}.weight", "differs from the source by"),
    Row("zero points removed", drop(f"{K}.qzeros"), "names", f"{K}.qzeros", "is missing"),
    Row("zero points of other sides", as_shape(f"{K}.qzeros", 4, 2), "shapes", f"{K}.qzeros", "asks for [2, 4]"),
    Row(
        "scales as integers", as_dtype(f"{K}.scales", "I16"), "dtypes", f"{K}.scales", "is I16, and the format has F16"
    ),
    Row("codes as floats", as_dtype(f"{K}.qweight", "F32"), "dtypes", f"{K}.qweight", "is F32, and the format has I32"),
    Row(
        "groups of another size",
        put("config.json", "quantization_config", "group_size", value=16),
        "shapes",
        f"{K}.scales",
        "is [2, 32], and the scheme asks for [4, 32]",
    ),
    Row(
        "groups that do not tile",
        put("config.json", "quantization_config", "group_size", value=40),
        "shapes",
        DOWN,
        "which 4-bit, group 40, asymmetric does not divide",
    ),
]
# a config of another tool, which leaves zero points free
FREE = both(
    put("config.json", "quantization_config", "sym", value=False), put("quantize_config.json", "sym", value=False)
)


@pytest.mark.parametrize("row", GPTQ, ids=str)
def test_one_damage_to_gptq(row: Row, make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="rtn", format="gptq")

    require_found(made.path, made.source, tmp_path, row)


@pytest.mark.parametrize("row", AWQ, ids=str)
def test_one_damage_to_awq(row: Row, make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="rtn", format="awq", symmetric=False)

    require_found(made.path, made.source, tmp_path, row)


@pytest.mark.parametrize(("fmt", "symmetric"), [("gptq", True), ("awq", True), ("awq", False)])
def test_nothing_is_wrong(fmt: str, symmetric: bool, make_artifact: Make) -> None:
    made = make_artifact("llama", method="rtn", format=fmt, symmetric=symmetric)

    require_right(made.path, made.source, nothing={"index", "kv-scales"})


def test_zero_points_of_gptq_that_are_free(make_artifact: Make, tmp_path: Path) -> None:
    """A checkpoint of another tool: readers take a stored 15 for a zero point of 0, or of 16."""
    made = make_artifact("llama", method="rtn", format="gptq")
    row = Row(
        "a zero point out of range",
        both(FREE, set_number(f"{K}.qzeros", 0, -0x0FFFFFFF)),
        "zero-points",
        K,
        "stores 15, which readers take for a zero point of 0 or of 16",
    )

    require_found(made.path, made.source, tmp_path, row)


def test_zero_points_of_gptq_that_are_free_and_in_range(make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="rtn", format="gptq")
    row = Row("one beside the middle", both(FREE, set_number(f"{K}.qzeros", 0, 0x77777776)), "", "", "")

    require_right(damaged(made.path, tmp_path, row), made.source, nothing={"index", "kv-scales"})


def test_awq_that_says_it_has_no_zero_points(make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="rtn", format="awq")
    symmetric = put("config.json", "quantization_config", "zero_point", value=False)
    one = tensor(f"{K}.qzeros", lambda stored: stored.having([SEVENS, *stored.numbers()[1:]]))
    row = Row("a zero point beside the middle", both(symmetric, one), "zero-points", K, "other than 8")

    require_found(made.path, made.source, tmp_path, row)
