"""An interrupted run goes on after its last finished block, to the bytes that an uninterrupted one writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quantkit.record
from quantkit.errors import Interrupted, ResourceError, UsageError
from quantkit.events import BlockDone, Event, Note, Stage
from quantkit.pipeline import quantize
from quantkit.recipe import Recipe

from .kills import content

Zoo = Callable[..., Path]
BLOCKS = 4


@pytest.fixture
def source(zoo: Zoo) -> Path:
    return zoo("llama", num_hidden_layers=BLOCKS)


@pytest.fixture
def recipe(calibration: Path) -> Recipe:
    return Recipe(group_size=32, samples=8, seq_len=20, dtype="float32", device="cpu", calibration=str(calibration))


class StopAt:
    """Raises when the pipeline enters a stage of a block; collects what it says before."""

    def __init__(self, block: int = -1, stage: str = "", error: BaseException | None = None) -> None:
        self.block, self.stage, self.error = block, stage, error or KeyboardInterrupt()
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Stage) and (event.block, event.stage) == (self.block, self.stage):
            raise self.error

    @property
    def blocks(self) -> list[int]:
        return [event.block for event in self.events if isinstance(event, BlockDone)]

    @property
    def notes(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Note)]


def interrupt(recipe: Recipe, source: Path, out: Path, block: int = 2, stage: str = "round") -> None:
    with pytest.raises(Interrupted):
        quantize(recipe, str(source), out, emit=StopAt(block, stage))
    assert [path.name for path in out.parent.iterdir()] == [f".{out.name}.partial"]


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "rtn", "max_shard_size": "20KB"},
        {"method": "gptq", "format": ("gptq", "compressed-tensors"), "kv_cache": "fp8"},
        {"method": "awq", "symmetric": False, "format": ("awq",), "max_shard_size": "20KB"},
        {"method": "none", "kv_cache": "fp8", "group_size": Recipe().group_size},
        {"method": "awq+gptq", "ignore": ("layers.1",), "indivisible": "keep"},
    ],
    ids=lambda changes: changes["method"],
)
def test_it_goes_on_after_every_block_to_the_same_bytes(
    source: Path, recipe: Recipe, changes: dict[str, Any], tmp_path: Path
) -> None:
    recipe = recipe.merged(**changes)
    quantize(recipe, str(source), tmp_path / "whole")

    for block in range(1, BLOCKS):
        with pytest.raises(Interrupted, match="interrupted") as stopped:
            quantize(recipe, str(source), tmp_path / "out", emit=StopAt(block, "advance"))
        assert stopped.value.hint == f"repeat the same command; it goes on after block {block} of {BLOCKS}"
        assert not (tmp_path / "out").exists()
    last = StopAt()
    quantize(recipe, str(source), tmp_path / "out", emit=last)

    assert last.blocks == [BLOCKS - 1]
    assert f"going on after block {BLOCKS - 1} of {BLOCKS}: an interrupted run got so far" in last.notes
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_before_the_first_block_nothing_is_kept(source: Path, recipe: Recipe, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()

    with pytest.raises(KeyboardInterrupt):
        quantize(recipe, str(source), place / "out", emit=StopAt(0, "advance"))

    assert list(place.iterdir()) == []


def test_a_full_disk_keeps_what_is_done_and_says_so(
    source: Path, recipe: Recipe, tmp_path: Path, calibration: Path
) -> None:
    quantize(recipe, str(source), tmp_path / "whole")

    with pytest.raises(ResourceError, match="disk is full") as full:
        quantize(
            recipe, str(source), tmp_path / "out", emit=StopAt(2, "write", ResourceError("disk is full", "free some"))
        )

    assert full.value.hint == f"free some; it goes on after block 2 of {BLOCKS}"
    quantize(recipe, str(source), tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "scheme": ({"group_size": 16}, "`group_size` was 32 and is 16"),
    "method": ({"method": "rtn"}, '`method` was "gptq" and is "rtn"'),
    "format": ({"format": ("gptq",)}, "`format` was .* and is"),
    "seed": ({"seed": 1, "samples": 3}, "`seed` was 0 and is 1"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_recipe_is_refused_and_the_first_can_still_go_on(
    source: Path, recipe: Recipe, tmp_path: Path, name: str
) -> None:
    changes, difference = CHANGES[name]
    out = tmp_path / "place" / "out"
    interrupt(recipe, source, out)

    with pytest.raises(UsageError, match=difference) as refused:
        quantize(recipe.merged(**changes), str(source), out)

    assert refused.value.hint == "repeat the command as it was, or pass `--restart` to start over"
    again = StopAt()
    quantize(recipe, str(source), out, emit=again)
    assert again.blocks == [2, 3]


def test_another_source_data_or_version_is_refused(
    zoo: Zoo, source: Path, recipe: Recipe, calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data, out = tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "place" / "out"
    shutil.copytree(source, model)
    shutil.copy(calibration, data)
    recipe = recipe.merged(calibration=str(data))
    interrupt(recipe, model, out)

    with pytest.raises(UsageError, match=r"`source` was .* and is"):
        quantize(recipe, str(zoo("llama", num_hidden_layers=BLOCKS, rope_theta=5000.0)), out)
    weights = model / "model.safetensors"
    data.write_text("".join(reversed(data.read_text().splitlines(keepends=True))))
    with pytest.raises(UsageError, match="`calibration tokens` was"):
        quantize(recipe, str(model), out)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(UsageError, match=r"`change of model.safetensors` was"):
        quantize(recipe, str(model), out)
    monkeypatch.setattr(quantkit.record, "_PACKAGES", ("quantkit", "torch", "pytest"))
    with pytest.raises(UsageError, match=r"`transformers` was .* and is null"):
        quantize(recipe, str(model), out)


def test_a_restart_forgets_the_interrupted_run(source: Path, recipe: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "place" / "out"
    interrupt(recipe, source, out)
    other = recipe.merged(group_size=16)
    quantize(other, str(source), tmp_path / "whole")

    again = StopAt()
    quantize(other, str(source), out, restart=True, emit=again)

    assert again.blocks == list(range(BLOCKS))
    assert content(out) == content(tmp_path / "whole")


def test_a_second_run_into_the_same_folder_is_refused_while_the_first_one_works(
    source: Path, recipe: Recipe, tmp_path: Path
) -> None:
    out, refusals = tmp_path / "place" / "out", []

    def meddle(event: Event) -> None:
        if isinstance(event, BlockDone):
            with pytest.raises(UsageError, match="another run is writing") as refused:
                quantize(recipe, str(source), out, restart=event.block == 1)
            refusals.append(refused.value.hint)

    quantize(recipe, str(source), tmp_path / "whole")
    quantize(recipe, str(source), out, emit=meddle)

    assert refusals == ["wait for it, or choose another directory"] * BLOCKS
    assert content(out) == content(tmp_path / "whole")


def test_a_damaged_state_is_refused(source: Path, recipe: Recipe, tmp_path: Path) -> None:
    out = tmp_path / "place" / "out"
    interrupt(recipe, source, out)
    ledger = out.parent / ".out.partial" / "ledger.json"
    ledger.write_text(json.dumps(json.loads(ledger.read_text()))[:-20])

    with pytest.raises(UsageError, match="is damaged"):
        quantize(recipe, str(source), out)
    quantize(recipe, str(source), out, restart=True)
