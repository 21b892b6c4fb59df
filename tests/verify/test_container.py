"""Artifacts of several files, damaged between the files; what is no artifact; and the end of a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantkit.errors import CheckpointError, UsageError
from quantkit.verify import require_verified, verify
from verify.damage import Damage, Row, damaged, flip, json_file, overwrite, put, remove, take, truncate
from verify.judged import require_found, require_right

Make = Callable[..., Any]

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM, Q = "model.norm.weight", "model.layers.0.self_attn.q_proj"


def copy_of(file: str, to: str) -> Damage:
    return lambda path: shutil.copy(path / file, path / to) and None


TABLE = [
    Row("a tensor in another file", put(INDEX, "weight_map", NORM, value=FIRST), "index", INDEX, NORM),
    Row("a tensor in no file", put(INDEX, "weight_map", "model.more.weight", value=FIRST), "index", INDEX, "more"),
    Row("a tensor not in the index", take(INDEX, "weight_map", NORM), "index", INDEX, NORM),
    Row("a file that is not there", put(INDEX, "weight_map", NORM, value="c.safetensors"), "index", INDEX, "c.safe"),
    Row("a file removed", remove(SECOND), "index", INDEX, SECOND),
    Row("another size", put(INDEX, "metadata", "total_size", value=7), "index", INDEX, "`total_size` is 7, and the"),
    Row("an index that is no JSON", overwrite(INDEX, "{"), "index", INDEX, "JSON"),
    Row("no weight_map", json_file(INDEX, lambda index: index.clear()), "index", INDEX, "weight_map"),
    Row(
        "a file beside the weights", copy_of(FIRST, "old.safetensors"), "index", "old.safetensors", "some engines load"
    ),
    Row("a file cut short", truncate(SECOND, 1), "headers", SECOND, "1 byte"),
    Row("codes in the second file", flip(f"{Q}.weight_packed"), "weights", f"{Q}.weight", "differs from the source"),
]


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_one_damage_between_files(row: Row, make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("qwen2", method="rtn", max_shard_size="60KB")

    require_found(made.path, made.source, tmp_path, row)


def test_nothing_is_wrong(make_artifact: Make) -> None:
    made = make_artifact("qwen2", method="rtn", max_shard_size="60KB")

    require_right(made.path, made.source, nothing={"kv-scales", "zero-points"})


def test_a_plain_checkpoint_is_looked_at_as_far_as_it_goes(zoo: Callable[..., Path]) -> None:
    path = zoo("llama")

    require_right(
        path,
        path,
        nothing={"index", "packed", "codes", "scales", "zero-points", "siblings", "weights", "kv-scales"},
    )


def test_another_source_is_found_out(make_artifact: Make, zoo: Callable[..., Path]) -> None:
    made, other = make_artifact("llama", method="rtn"), zoo("qwen3")

    verdict = verify(made.path, other)

    assert {check.id for check in verdict.failed} >= {"config", "untouched", "accounted"}


def test_what_is_no_artifact_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        verify(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is an empty directory"):
        verify(tmp_path)


def test_several_artifacts_in_one_folder_are_listed(make_artifact: Make, tmp_path: Path) -> None:
    for name in ("gptq", "awq"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")

    with pytest.raises(CheckpointError, match="holds several artifacts") as caught:
        verify(tmp_path)

    assert all(f"`{tmp_path / name}`" in caught.value.hint for name in ("gptq", "awq"))


def test_what_a_run_wrote_is_returned_when_it_is_right(make_artifact: Make) -> None:
    made = make_artifact("llama", method="rtn")

    assert require_verified(made.path, made.source).ok


def test_what_a_run_wrote_is_refused_when_it_is_not(make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("llama", method="rtn")
    path = damaged(made.path, tmp_path, Row("", truncate("model.safetensors", 3), "", "", ""))

    with pytest.raises(CheckpointError, match=r"failed its verification \(headers\): 1 wrong") as caught:
        require_verified(path, made.source)

    assert "`model.safetensors`" in caught.value.message
    assert "nothing was kept" in caught.value.hint


def test_several_things_wrong_are_counted_together(make_artifact: Make, tmp_path: Path) -> None:
    made = make_artifact("qwen2", method="rtn", max_shard_size="60KB")
    damage = [flip(f"{NORM}", 1, 0, 1), flip("model.layers.1.input_layernorm.weight", 1, 0, 1)]
    path = tmp_path / "copy"
    shutil.copytree(made.path, path)
    for each in damage:
        each(path)

    with pytest.raises(CheckpointError, match=r"\(untouched, files\): [34] wrong, such as `model\."):
        require_verified(path, made.source)


@pytest.mark.parametrize("asked", [{"override": ["q_proj: bits=8"]}, {"ignore": ["layers.0.mlp.up_proj"]}])
def test_what_the_options_ask_for_is_no_failure_of_the_run(asked: dict[str, Any], make_artifact: Make) -> None:
    """The same artifact fails `verify`: an engine would not load it."""
    made = make_artifact("llama", method="rtn", **asked)

    verdict = require_verified(made.path, made.source)

    assert [check.id for check in verdict.failed] == ["siblings"]
    assert not verify(made.path, made.source).ok
