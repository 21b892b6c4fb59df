"""A model as `check` sees it: a plain one as it would be quantized, a quantized one as it is stored."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verify.damage import put

from quantkit.check.subject import Subject
from quantkit.engines.base import ACT_ORDER, GPTQ_V2, NO_ZERO_POINTS
from quantkit.errors import UsageError
from quantkit.recipe import Recipe
from quantkit.scheme import Scheme

Make = Callable[..., Any]
PACKING = "quantization_config"


def open_copy(made: Any, tmp_path: Path, **changes: Any) -> Subject:
    path = tmp_path / "copy"
    shutil.copytree(made.path, path)
    for key, value in changes.items():
        put("config.json", PACKING, key, value=value)(path)
    return Subject.open(str(path), Recipe())


def test_a_plain_checkpoint_gets_the_schemes_of_the_recipe(zoo: Callable[..., Path]) -> None:
    recipe = Recipe(group_size=32, ignore=("q_proj",), override=("down_proj: bits=8",), kv_cache="fp8")
    subject = Subject.open(str(zoo("llama")), recipe)

    assert (subject.stored, subject.quirks, subject.fp8_cache) == (None, frozenset(), True)
    assert len(subject.shapes) == 14 and set(subject.shapes) == set(subject.schemes)
    assert subject.shapes["model.layers.1.mlp.down_proj"] == (64, 96)
    assert subject.schemes["model.layers.1.self_attn.q_proj"] is None
    assert subject.schemes["model.layers.0.mlp.down_proj"] == Scheme(8, 32)
    assert subject.schemes["model.layers.0.mlp.up_proj"] == Scheme(4, 32)


@pytest.mark.parametrize("fmt", ["compressed-tensors", "gptq", "awq", "modelopt"])
def test_an_artifact_is_what_is_stored(fmt: str, make_artifact: Make) -> None:
    kept = {"ignore": ["layers.0.mlp.down_proj"]}
    made = make_artifact("llama", method="rtn", format=fmt, symmetric=fmt != "awq", **kept)
    subject, plain = Subject.open(str(made.path), Recipe()), Subject.open(str(made.source), Recipe())

    assert subject.stored == fmt
    assert subject.quirks == frozenset()
    assert subject.shapes == plain.shapes and list(subject.shapes) == list(plain.shapes)
    lost = [name for name, scheme in subject.schemes.items() if scheme is None]
    assert lost == ["model.layers.0.mlp.down_proj"]
    assert {scheme for scheme in subject.schemes.values() if scheme} == {Scheme(4, 32, fmt != "awq")}


def test_it_is_judged_as_stored_in_its_format_and_as_written_anew_in_others(make_artifact: Make) -> None:
    subject = Subject.open(str(make_artifact("llama", method="rtn", format="awq", symmetric=False).path), Recipe())

    assert [each.format for each in subject.judge_all((), "transformers")] == ["awq"]
    assert subject.judge("awq", "transformers").loads
    assert subject.judge("compressed-tensors", "transformers").loads
    assert "0 would wrap into its neighbour" in subject.judge("gptq", "transformers").message


def test_the_scales_of_a_cache_are_noticed(make_artifact: Make) -> None:
    with_scales = Subject.open(str(make_artifact("llama", method="rtn", kv_cache="fp8").path), Recipe())
    without = Subject.open(str(make_artifact("llama", method="rtn").path), Recipe())

    assert (with_scales.fp8_cache, without.fp8_cache) == (True, False)


@pytest.mark.parametrize(
    ("fmt", "changes", "quirk", "refused_by"),
    [
        ("gptq", {"desc_act": True}, ACT_ORDER, "vllm"),
        ("gptq", {"checkpoint_format": "gptq_v2", "sym": False}, GPTQ_V2, "tgi"),
        ("awq", {"zero_point": False}, NO_ZERO_POINTS, ""),
    ],
)
def test_what_is_unusual_is_noticed_and_belongs_to_the_stored_format(
    fmt: str, changes: dict[str, Any], quirk: str, refused_by: str, make_artifact: Make, tmp_path: Path
) -> None:
    subject = open_copy(make_artifact("llama", method="rtn", format=fmt), tmp_path, **changes)

    assert subject.quirks == {quirk}
    if refused_by:
        found = subject.judge(fmt, refused_by)
        assert any(quirk.split()[0] in v.answer.reason or "desc_act" in v.answer.reason for v in found.refused) or (
            "version 2" in found.message
        )
    others = subject.judge("compressed-tensors", "vllm").message
    assert "desc_act" not in others and "version 2" not in others


@pytest.mark.parametrize(
    ("recipe", "option"),
    [
        ({"bits": 8}, "--bits"),
        ({"group_size": 64}, "--group-size"),
        ({"symmetric": False}, "--symmetric"),
        ({"ignore": ("q_proj",)}, "--ignore"),
        ({"override": ("q_proj: bits=8",)}, "--override"),
        ({"kv_cache": "fp8"}, "--kv-cache"),
    ],
)
def test_options_that_would_change_an_artifact_are_refused(
    recipe: dict[str, Any], option: str, make_artifact: Make
) -> None:
    made = make_artifact("llama", method="rtn")

    with pytest.raises(UsageError, match=f"is quantized already, and `{option}` would change how"):
        Subject.open(str(made.path), Recipe(**recipe))


def test_a_pattern_that_matches_nothing_is_refused(zoo: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="matches no linear") as caught:
        Subject.open(str(zoo("llama")), Recipe(ignore=("down_porj",)))

    assert "did you mean `down_proj`?" in caught.value.hint
