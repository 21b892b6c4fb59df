"""The same source and recipe give the same bytes; a written recipe repeats its run; shards read back as one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo.artifacts import digests, read_all, same_bytes
from zoo.models import rows

import quantkit
from quantkit.pipeline import quantize
from quantkit.recipe import METHOD_NAMES, Recipe

Make = Callable[..., Any]


@pytest.mark.parametrize("method", [name for name in METHOD_NAMES if name != "none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_repeats_byte_for_byte(make_artifact: Make, tmp_path: Path, method: str, dtype: str) -> None:
    made = make_artifact("qwen2", method=method, dtype=dtype)

    again = quantize(made.record.plan.recipe, str(made.source), tmp_path / "again")

    assert digests(tmp_path / "again") == digests(made.path) == again.outputs["compressed-tensors"]["sha256"]
    names = {file.name for file in made.path.iterdir()}
    assert {file.name for file in (tmp_path / "again").iterdir()} == names
    for name in names - {"quantkit.json"}:  # which holds times
        assert (tmp_path / "again" / name).read_bytes() == (made.path / name).read_bytes(), name


def test_other_runs_in_the_same_process_change_nothing(make_artifact: Make, tmp_path: Path) -> None:
    first = make_artifact("llama", method="awq+gptq")
    torch.manual_seed(123)
    make_artifact("gemma", method="awq")

    quantize(first.record.plan.recipe, str(first.source), tmp_path / "again")

    assert digests(tmp_path / "again") == digests(first.path)


def test_the_state_of_the_process_is_left_alone(make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="awq+gptq")
    torch.manual_seed(5)
    before = torch.get_rng_state(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()

    quantize(made.record.plan.recipe, str(made.source), tmp_path / "again")

    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()) == before[1:]


@pytest.mark.parametrize("recipe", [{}, {"symmetric": False, "override": ["down_proj: bits=8"], "ignore": ["q_proj"]}])
def test_the_written_recipe_repeats_the_run(make_artifact: Make, tmp_path: Path, recipe: dict[str, Any]) -> None:
    made = make_artifact("llama", method="awq+gptq", **recipe)

    written = Recipe.from_yaml(made.path / "quantkit-recipe.yaml")
    quantize(written, str(made.source), tmp_path / "again")

    assert written == made.record.plan.recipe
    assert digests(tmp_path / "again") == digests(made.path)


def test_shards_hold_what_one_file_holds(make_artifact: Make) -> None:
    whole = make_artifact("qwen2", method="gptq")
    sharded = make_artifact("qwen2", method="gptq", max_shard_size="40KB")

    files = sorted(file.name for file in sharded.path.glob("*.safetensors"))
    assert len(files) == 3 and (sharded.path / "model.safetensors.index.json").is_file()
    assert [file.name for file in whole.path.glob("*.safetensors")] == ["model.safetensors"]
    one, many = read_all(whole.path), read_all(sharded.path)
    assert one.keys() == many.keys()
    assert all(same_bytes(one[name], many[name]) for name in one)
    ids = torch.stack(rows(12))
    with torch.no_grad():
        left, right = (quantkit.load(made.path, "cpu")(ids).logits for made in (whole, sharded))
    assert torch.equal(left, right)


def test_another_seed_draws_other_calibration_rows(make_artifact: Make) -> None:
    few = [make_artifact("llama", method="gptq", samples=3, seed=seed) for seed in (0, 1)]

    assert few[0].record.calibration["tokens_digest"] != few[1].record.calibration["tokens_digest"]
    assert digests(few[0].path) != digests(few[1].path)
