"""compressed-tensors artifacts, one damage at a time: the check that is for it fails, and names the place."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verify.damage import (
    WEIGHTS,
    Row,
    add,
    as_dtype,
    as_shape,
    drop,
    fill,
    flip,
    half,
    json_file,
    overwrite,
    put,
    remove,
    set_number,
    take,
    truncate,
)
from verify.judged import require_found, require_right

Make = Callable[..., Any]

Q, DOWN, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.layers.0.mlp.up_proj"
NORM, EMBEDDING = "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight"
PACKING = ("quantization_config", "config_groups")

CONTENT = [
    Row("a bit of one code", flip(f"{Q}.weight_packed", 1, 0, 1), "files", WEIGHTS, "another sha256", sealed=False),
    Row("every code", flip(f"{Q}.weight_packed"), "weights", f"{Q}.weight", "differs from the source by"),
    Row("codes in words of zeros", fill(f"{Q}.weight_packed", 0, 64), "codes", Q, "one code only in 2 of 64 rows"),
    Row("codes all zero", fill(f"{DOWN}.weight_packed", 0, 64 * 48), "codes weights", DOWN, "in 64 of 64 rows"),
    Row("a scale of 0", set_number(f"{Q}.weight_scale", 3, 0.0), "scales", Q, "has 1 of 128 scales"),
    Row("a negative scale", set_number(f"{Q}.weight_scale", 3, -0.5), "scales", Q, "such as -0.5"),
    Row("a scale that is NaN", set_number(f"{Q}.weight_scale", 0, math.nan), "scales", Q, "such as nan"),
    Row("a scale that is infinite", set_number(f"{UP}.weight_scale", 0, math.inf), "scales", UP, "such as inf"),
    Row("a norm", set_number(NORM, 0, 9.0), "untouched", NORM, "differs from the source, and no fold on record"),
    Row("an embedding", flip(EMBEDDING, 1, 0, 1), "untouched", EMBEDDING, "differs from the source"),
    Row("a norm of another dtype", as_dtype(NORM, "BF16"), "untouched", NORM, "is BF16 [64], and the source has F16"),
    Row(
        "sides swapped",
        set_number(f"{DOWN}.weight_shape", 0, 96),
        "codes",
        DOWN,
        "is int32 [64, 12], and the scheme asks for int32 [96, 12]",
    ),
]
STRUCTURE = [
    Row("a scale removed", drop(f"{Q}.weight_scale"), "names", f"{Q}.weight_scale", "is missing"),
    Row("a shape removed", drop(f"{Q}.weight_shape"), "names", f"{Q}.weight_shape", "is missing"),
    Row("a norm removed", drop(NORM), "names", "copy", NORM),
    Row("an embedding removed", drop(EMBEDDING), "names", "copy", EMBEDDING),
    Row(
        "a weight that nothing asks for",
        add("model.layers.0.mlp.more_proj.weight", half(8, 8)),
        "names accounted",
        "model.layers.0.mlp.more_proj.weight",
        "the model of config.json does not have",
    ),
    Row("a bias that nothing asks for", add(f"{Q}.bias", half(64)), "names accounted", f"{Q}.bias", "does not have"),
    Row(
        "zero points of a symmetric linear",
        add(f"{Q}.weight_zero_point", half(8)),
        "names",
        f"{Q}.weight_zero_point",
        "has no place",
    ),
    Row("packed and plain", add(f"{Q}.weight", half(64, 64)), "config", "config.json", "both packed and as"),
    Row("codes as floats", as_dtype(f"{Q}.weight_packed", "F32"), "dtypes", f"{Q}.weight_packed", "is F32, and the"),
    Row("scales as integers", as_dtype(f"{Q}.weight_scale", "I16"), "dtypes", f"{Q}.weight_scale", "is I16, and the"),
    Row("a norm as integers", as_dtype(NORM, "I16"), "dtypes untouched", NORM, "floating-point numbers"),
    Row("codes of other sides", as_shape(f"{Q}.weight_packed", 8, 64), "shapes", f"{Q}.weight_packed", "asks for [64"),
    Row("scales of other sides", as_shape(f"{Q}.weight_scale", 2, 64), "shapes", f"{Q}.weight_scale", "is [2, 64]"),
    Row("a norm of other sides", as_shape(NORM, 8, 8), "shapes untouched", NORM, "is [8, 8], and the model has [64]"),
]
CONTAINER = [
    Row("a file cut short", truncate(WEIGHTS, 10), "headers", WEIGHTS, "10 bytes"),
    Row("a file of another kind", overwrite(WEIGHTS, "<!DOCTYPE html>"), "headers", WEIGHTS, "claim a header of"),
    Row("a file cut short, and digests", truncate(WEIGHTS, 10), "headers files", WEIGHTS, "sha256", sealed=False),
    Row("config.json removed", remove("config.json"), "config", "config.json", "config.json"),
    Row("config.json no JSON", overwrite("config.json", "{"), "config", "config.json", "valid JSON"),
    Row("a setting", put("config.json", "rms_norm_eps", value=0.5), "config", "config.json", "`rms_norm_eps` is 0.5"),
    Row("a setting removed", take("config.json", "bos_token_id"), "config", "config.json", "`bos_token_id` is None"),
    Row("a setting more", put("config.json", "sliding_window", value=8), "config", "config.json", "`sliding_window`"),
    Row(
        "an unknown method",
        put("config.json", "quantization_config", "quant_method", value="odd"),
        "config",
        "config.json",
        "is quantized as `odd`",
    ),
    Row("no quantization_config", take("config.json", "quantization_config"), "names", "copy", "q_proj.weight"),
    Row(
        "groups of another size",
        put("config.json", *PACKING, "group_0", "weights", "group_size", value=16),
        "shapes",
        f"{Q}.weight_scale",
        "is [64, 2], and the scheme asks for [64, 4]",
    ),
    Row(
        "codes of another width",
        put("config.json", *PACKING, "group_0", "weights", "num_bits", value=8),
        "shapes",
        f"{Q}.weight_packed",
        "is [64, 8], and the scheme asks for [64, 16]",
    ),
    Row(
        "symmetric as asymmetric",
        put("config.json", *PACKING, "group_0", "weights", "symmetric", value=False),
        "names",
        f"{Q}.weight_zero_point",
        "is missing",
    ),
]
FILES = [
    Row("a tokenizer removed", remove("tokenizer.json"), "files", "tokenizer.json", "of the source is missing"),
    Row("a tokenizer changed", overwrite("tokenizer.json", "{}"), "files", "tokenizer.json", "differs from the source"),
    Row("its settings removed", remove("tokenizer_config.json"), "files", "tokenizer_config.json", "is missing"),
    Row("no generation settings", remove("generation_config.json"), "files", "generation_config.json", "is missing"),
    Row(
        "a digest",
        put("quantkit.json", "output", "sha256", WEIGHTS, value="0" * 64),
        "files",
        WEIGHTS,
        "another sha256",
        sealed=False,
    ),
    Row(
        "a file that is not there",
        put("quantkit.json", "output", "sha256", "b.safetensors", value="0" * 64),
        "files",
        "b.safetensors",
        "is missing, and `quantkit.json` lists it",
        sealed=False,
    ),
    Row(
        "a file that is not listed",
        take("quantkit.json", "output", "sha256", WEIGHTS),
        "files",
        WEIGHTS,
        "is not listed",
        sealed=False,
    ),
    Row(
        "a record that is no JSON",
        overwrite("quantkit.json", "["),
        "files",
        "quantkit.json",
        "valid JSON",
        sealed=False,
    ),
]


@pytest.mark.parametrize("row", CONTENT + STRUCTURE + CONTAINER + FILES, ids=str)
def test_one_damage(row: Row, make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="rtn")

    require_found(made.path, made.source, tmp_path, row)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("against", [True, False])
def test_nothing_is_wrong(symmetric: bool, against: bool, make_artifact: Make) -> None:
    made = make_artifact("llama", method="rtn", symmetric=symmetric)
    unasked = set() if against else {"weights", "untouched", "accounted"}

    require_right(
        made.path,
        made.source if against else None,
        nothing={"index", "kv-scales"} | ({"zero-points"} if symmetric else set()) | unasked,
    )


ASYMMETRIC = [
    Row("zero points removed", drop(f"{Q}.weight_zero_point"), "names", f"{Q}.weight_zero_point", "is missing"),
    Row("zero points as floats", as_dtype(f"{Q}.weight_zero_point", "F32"), "dtypes", f"{Q}.weight_zero_point", "F32"),
    Row(
        "zero points of other sides",
        as_shape(f"{Q}.weight_zero_point", 2, 8),
        "shapes",
        f"{Q}.weight_zero_point",
        "is [2, 8], and the scheme asks for [8, 2]",
    ),
    Row("every zero point", flip(f"{Q}.weight_zero_point", 0x88), "weights", f"{Q}.weight", "differs from the source"),
]


@pytest.mark.parametrize("row", ASYMMETRIC, ids=str)
def test_one_damage_to_zero_points(row: Row, make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="rtn", symmetric=False)

    require_found(made.path, made.source, tmp_path, row)


def test_a_linear_that_the_config_says_is_packed(make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="rtn", ignore=[UP, UP.replace("up", "gate")])
    says_packed = json_file("config.json", lambda c: c["quantization_config"]["ignore"].remove(UP))
    row = Row(
        "one taken from `ignore`", says_packed, "packed", UP, "is not packed, and `quantization_config` says 4-bit"
    )

    require_found(made.path, made.source, tmp_path, row)


def test_linears_that_engines_fuse_and_whose_schemes_differ(make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="rtn", override=["layers.0.self_attn.q_proj: bits=8"])
    row = Row(
        "nothing", lambda path: None, "siblings", "model.layers.0.self_attn", "q_proj 8-bit, group 32, symmetric; k_"
    )

    require_found(made.path, made.source, tmp_path, row)


def test_linears_that_engines_fuse_of_which_one_is_kept(make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="rtn", ignore=["layers.1.mlp.up_proj"])
    row = Row("nothing", lambda path: None, "siblings", "model.layers.1.mlp", "up_proj kept")

    require_found(made.path, made.source, tmp_path, row)


def test_tensors_that_a_fold_on_record_rewrote(make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="awq")
    require_right(made.path, made.source, nothing={"index", "kv-scales", "zero-points"})

    forgotten = json_file("quantkit.json", lambda record: record.update(folds=[]))
    row = Row("folds removed", forgotten, "untouched", NORM, "no fold on record changed it")
    found = require_found(made.path, made.source, tmp_path, row)

    changed = next(check for check in found.checks if check.id == "untouched")
    assert len(changed.failures) == 3


def test_a_fold_explains_factors_and_not_another_weight(make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="awq")
    row = Row("every code", flip(f"{Q}.weight_packed"), "weights", f"{Q}.weight", "differs from the source by")

    require_found(made.path, made.source, tmp_path, row)


def test_a_rewritten_norm_must_be_finite(make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="awq")
    row = Row("a norm that is NaN", set_number(NORM, 5, math.nan), "untouched", NORM, "NaN")

    require_found(made.path, made.source, tmp_path, row)
