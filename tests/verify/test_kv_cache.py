"""Artifacts with scales of an FP8 KV cache, one damage at a time: the check of these scales fails and says which."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verify.damage import (
    Damage,
    Row,
    Stored,
    add,
    as_dtype,
    both,
    drop,
    json_file,
    overwrite,
    put,
    set_number,
    take,
    tensor,
)
from verify.judged import require_found, require_right

Make = Callable[..., Any]

FIRST, SECOND = "model.layers.0.self_attn", "model.layers.1.self_attn"
EVERY = [f"{each}.{which}_scale" for each in (FIRST, SECOND) for which in "kv"]
ONE, TWO = "kv_cache_scales.tp1.json", "kv_cache_scales.tp2.json"
FACTORS = ("kv_cache", "scaling_factor")


def scale(value: float) -> Damage:
    """Change the key scale of the first layer, and it alone."""
    return set_number(f"{FIRST}.k_scale", 0, value)


TENSORS = [
    Row("one removed", drop(f"{FIRST}.v_scale"), "kv-scales", f"{FIRST}.v_scale", "would use a scale of 1"),
    Row("all removed", drop(*EVERY), "kv-scales", f"{SECOND}.k_scale", "is missing"),
    Row("a scale of 0", scale(0.0), "kv-scales", f"{FIRST}.k_scale", "is 0.0, not finite and positive"),
    Row("a negative one", scale(-1.0), "kv-scales", f"{FIRST}.k_scale", "is -1.0, not finite and positive"),
    Row("NaN", scale(math.nan), "kv-scales", f"{FIRST}.k_scale", "is nan, not finite and positive"),
    Row("infinite", scale(math.inf), "kv-scales", f"{FIRST}.k_scale", "is inf, not finite and positive"),
    Row("an integer", as_dtype(f"{FIRST}.k_scale", "I32"), "kv-scales", f"{FIRST}.k_scale", "is I32 [1], not one"),
    Row("one for each head", tensor(f"{FIRST}.k_scale", lambda s: Stored("F32", (2,), s.data * 2)), "kv-scales",
        f"{FIRST}.k_scale", "is F32 [2], not one number"),
    Row("of no attention", add("model.layers.7.self_attn.k_scale", Stored("F32", (1,), b"\0\0\x80?")), "kv-scales",
        "model.layers.7.self_attn.k_scale", "is the scale of no attention"),
    Row("by another format's name", add(f"{FIRST}.k_proj.k_scale", Stored("F32", (1,), b"\0\0\x80?")), "kv-scales",
        f"{FIRST}.k_proj.k_scale", "a name this format does not use"),
    Row("not declared", take("config.json", "quantization_config", "kv_cache_scheme"), "kv-scales", EVERY[0],
        "is one of 4 scales of a KV cache that the config does not declare"),
    Row("declared as integers", put("config.json", "quantization_config", "kv_cache_scheme", "type", value="int"),
        "kv-scales", "config.json", "that is not FP8"),
]  # fmt: skip
FILES = [
    Row("a rank removed", take(TWO, *FACTORS, "1"), "kv-scales", TWO, "has ranks 0, and 2 from 0 on are needed"),
    Row("a rank too many", put(ONE, *FACTORS, "1", value={}), "kv-scales", ONE, "has ranks 0, 1, and 1 from 0 on"),
    Row("a layer removed", take(TWO, *FACTORS, "1", "0"), "kv-scales", TWO, "rank 1: has 1 layers, and the model's 2"),
    Row("a layer renamed", json_file(ONE, lambda c: c["kv_cache"]["scaling_factor"]["0"].update(
        {"2": c["kv_cache"]["scaling_factor"]["0"].pop("1")})), "kv-scales", ONE, "the model's 2 are needed"),
    Row("another value", put(TWO, *FACTORS, "1", "0", value=3.5), "kv-scales", TWO,
        "rank 1: layer 0 has 3.5, and the larger of its scales in the weights is"),
    Row("a negative value", put(ONE, *FACTORS, "0", "1", value=-1.0), "kv-scales", ONE, "layer 1 has -1.0, not finite"),
    Row("a value of 0", put(ONE, *FACTORS, "0", "1", value=0), "kv-scales", ONE, "layer 1 has 0, not finite"),
    Row("text as a value", put(ONE, *FACTORS, "0", "1", value="1"), "kv-scales", ONE, "layer 1 has '1', not finite"),
    Row("no object of layers", put(ONE, *FACTORS, "0", value=[1, 2]), "kv-scales", ONE, "has no layers"),
    Row("another model", put(ONE, "model_type", value="qwen2"), "kv-scales", ONE, "is for model type `qwen2`"),
    Row("another type", put(ONE, "kv_cache", "dtype", value="int8"), "kv-scales", ONE, "for `float8_e4m3fn`"),
    Row("no factors", take(ONE, *FACTORS), "kv-scales", ONE, "has no `scaling_factor`"),
    Row("no JSON", overwrite(ONE, "{"), "kv-scales", ONE, "valid JSON"),
]  # fmt: skip
MODELOPT = [
    Row("one removed", drop(f"{FIRST}.k_proj.k_scale"), "kv-scales", f"{FIRST}.k_proj.k_scale", "is missing"),
    Row("a negative one", set_number(f"{SECOND}.v_proj.v_scale", 0, -1.0), "kv-scales", f"{SECOND}.v_proj.v_scale",
        "is -1.0, not finite and positive"),
    Row("declared in one of two files", put("hf_quant_config.json", "quantization", "kv_cache_quant_algo", value=None),
        "kv-scales files", "hf_quant_config.json", "and config.json disagree whether there is an FP8 KV cache"),
    Row("by another format's name", add(f"{FIRST}.k_scale", Stored("F32", (1,), b"\0\0\x80?")), "kv-scales",
        f"{FIRST}.k_scale", "a name this format does not use"),
]  # fmt: skip


@pytest.mark.parametrize("row", TENSORS + FILES, ids=str)
def test_one_damage(row: Row, make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="rtn", kv_cache="fp8")

    require_found(made.path, made.source, tmp_path, row)


@pytest.mark.parametrize("row", MODELOPT, ids=str)
def test_one_damage_in_modelopt(row: Row, make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="rtn", kv_cache="fp8", format="modelopt")

    require_found(made.path, made.source, tmp_path, row)


@pytest.mark.parametrize("fmt", ["compressed-tensors", "modelopt"])
def test_nothing_is_wrong(fmt: str, make_artifact: Make) -> None:
    made = make_artifact("llama", method="rtn", kv_cache="fp8", format=fmt)

    require_right(made.path, made.source, nothing={"index", "zero-points"})


def test_scales_alone(make_artifact: Make, tmp_path: Path) -> None:
    """An artifact that holds scales of a cache, and no packed linear."""
    made = make_artifact("llama", method="none", group_size=None, kv_cache="fp8")
    row = Row("all removed", drop(*EVERY), "kv-scales packed", "config.json", "and no linear is packed")

    require_right(made.path, made.source, nothing={"index", "zero-points", "codes", "scales", "weights"})
    require_found(made.path, made.source, tmp_path, row)


def test_the_file_is_compared_with_the_larger_scale(make_artifact: Make, tmp_path: Path) -> None:
    """The one factor of a layer must hold for its keys and its values."""
    made = make_artifact("llama", method="rtn", kv_cache="fp8")
    larger = both(set_number(f"{FIRST}.k_scale", 0, 2.0), set_number(f"{FIRST}.v_scale", 0, 4.0))
    row = Row("larger scales", larger, "kv-scales", ONE, "and the larger of its scales in the weights is 4")

    require_found(made.path, made.source, tmp_path, row)
