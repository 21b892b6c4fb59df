"""ModelOpt artifacts, one damage at a time: the check that is for it fails, and names the place."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verify.damage import (
    Row,
    as_dtype,
    as_shape,
    drop,
    fill,
    flip,
    overwrite,
    put,
    remove,
    set_number,
)
from verify.judged import require_found, require_right

Make = Callable[..., Any]

V, GATE, FILE = "model.layers.0.self_attn.v_proj", "model.layers.1.mlp.gate_proj", "hf_quant_config.json"

TABLE = [
    Row("every code", flip(f"{V}.weight"), "weights", f"{V}.weight", "differs from the source by"),
    Row("codes without the sign flipped", flip(f"{V}.weight", 0x88), "weights", f"{V}.weight", "differs"),
    Row("holes in the codes", fill(f"{GATE}.weight", 0, 64 * 4, 0x33), "codes", GATE, "one code only in 8 of 96 rows"),
    Row("a scale of 0", set_number(f"{V}.weight_scale", 5, 0.0), "scales", V, "has 1 of 64 scales"),
    Row("a negative scale", set_number(f"{V}.weight_scale", 5, -2.0), "scales", V, "such as -2.0"),
    Row("a scale that is NaN", set_number(f"{V}.weight_scale", 5, math.nan), "scales", V, "such as nan"),
    Row("scaled inputs", set_number(f"{V}.pre_quant_scale", 1, 2.0), "codes", V, "scales the inputs of the linear"),
    Row("input scales removed", drop(f"{V}.pre_quant_scale"), "names", f"{V}.pre_quant_scale", "is missing"),
    Row(
        "input scales of another size",
        as_shape(f"{V}.pre_quant_scale", 8, 8),
        "shapes",
        f"{V}.pre_quant_scale",
        "is [8, 8], and the scheme asks for [64]",
    ),
    Row("codes as signed", as_dtype(f"{V}.weight", "I8"), "dtypes", f"{V}.weight", "is I8, and the format has U8"),
    Row("codes of other sides", as_shape(f"{V}.weight", 64, 16), "shapes", f"{V}.weight", "asks for [16, 64]"),
    Row("no file for TensorRT-LLM", remove(FILE), "files", FILE, "has no `hf_quant_config.json`"),
    Row("its file no JSON", overwrite(FILE, "[]"), "files kv-scales", FILE, "JSON"),
    Row(
        "its file of other groups",
        put(FILE, "quantization", "group_size", value=64),
        "files",
        FILE,
        "disagrees with `quantization_config` of config.json in `quantization`",
    ),
    Row(
        "config.json of zero points",
        put("config.json", "quantization_config", "has_zero_point", value=True),
        "config files",
        "config.json",
        "zero points cannot be read",
    ),
]


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_one_damage(row: Row, make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="rtn", format="modelopt")

    require_found(made.path, made.source, tmp_path, row)


def test_nothing_is_wrong(make_artifact: Make) -> None:
    made = make_artifact("llama", method="rtn", format="modelopt")

    require_right(made.path, made.source, nothing={"index", "kv-scales", "zero-points"})
