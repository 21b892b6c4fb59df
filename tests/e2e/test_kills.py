"""`kill -9` at any moment: no plausible output is there before it is complete, and the same command completes it."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .kills import Server, content

Zoo = Callable[..., Path]
KILLS = 15  # of each kind


@pytest.fixture(scope="module")
def server() -> Server:
    return Server()


@pytest.fixture
def command(zoo: Zoo, calibration: Path) -> list[str]:
    options = "--method awq+gptq --format awq --format compressed-tensors --group-size 32 --seq-len 20 --dtype float32"
    return [
        *(
            "quantize",
            str(zoo("llama", num_hidden_layers=4)),
            "--calibration",
            str(calibration),
            "--quiet",
            "--no-eval",
        ),
        *options.split(),
        *("--max-shard-size", "40KB", "--kv-cache", "fp8"),
    ]


def kill_until_done(server: Server, command: list[str], out: Path, kill: Callable[[], dict[str, float]]) -> int:
    """Repeat a command that is killed each time until it gets through; returns how often it was killed."""
    killed = 0
    while True:
        code, _ = server.run([*command, "-o", str(out)], **kill())  # type: ignore[arg-type]
        if code == 0 or out.exists():
            return killed + (code != 0)
        assert code == -9
        killed += 1


@pytest.mark.parametrize("kind", ["operation", "time"])
def test_killed_at_random_points_it_completes_to_the_same_bytes(
    server: Server, command: list[str], tmp_path: Path, kind: str
) -> None:
    started = time.monotonic()
    code, operations = server.run([*command, "-o", str(tmp_path / "whole")])
    seconds, chance = time.monotonic() - started, random.Random(kind)
    whole, killed, out = content(tmp_path / "whole"), 0, tmp_path / "place" / "out"
    assert code == 0 and operations > 100

    def kill() -> dict[str, float]:
        if kind == "operation":
            return {"kill_at": chance.randint(1, operations)}
        return {"kill_after": chance.uniform(0, seconds)}

    while killed < KILLS:
        killed += kill_until_done(server, command, out, kill)
        assert content(out) == whole
        shutil.rmtree(out.parent)


def test_a_limit_on_the_size_of_files_is_reported_and_the_run_goes_on_without_it(
    server: Server, command: list[str], tmp_path: Path
) -> None:
    assert server.run([*command, "-o", str(tmp_path / "whole")])[0] == 0
    out = tmp_path / "out"

    for limit in (1_000, 30_000, 39_000):
        code, _ = server.run([*command, "-o", str(out)], limit=limit)
        assert code == 3 and not out.exists()

    assert server.run([*command, "-o", str(out)])[0] == 0
    assert content(out) == content(tmp_path / "whole")
