"""A run that is told to stop, in whichever way, says so, leaves no output, and goes on when it is repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .kills import content

Zoo = Callable[..., Path]


def _heed() -> None:
    """Undo what a shell does to background jobs and `nohup` to everything: their children ignore these signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_in_the_middle_ends_the_run_which_can_go_on(
    zoo: Zoo, calibration: Path, tmp_path: Path, name: str
) -> None:
    place = tmp_path / "place"
    command = [sys.executable, "-m", "quantkit", "quantize", str(zoo("llama", num_hidden_layers=32))]
    command += ["--group-size", "32", "--method", "awq+gptq", "--calibration", str(calibration), "--no-eval", "-o"]
    place.mkdir()

    env = os.environ | {"OMP_NUM_THREADS": "1"}  # other tests work beside this one
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    with subprocess.Popen([*command, str(place / "out")], **pipes, preexec_fn=_heed) as process:  # noqa: PLW1509  # no threads here
        assert process.stderr is not None
        # Python drops an interrupt that falls into a callback of its garbage collector, as while modules are imported
        assert any(line.startswith("block 1/") for line in process.stderr)
        process.send_signal(getattr(signal, name))
        out, err = process.communicate(timeout=60)

    assert process.returncode == 130 and out == ""
    assert "error: interrupted" in err and "Traceback" not in err
    assert "hint: repeat the same command; it goes on after block " in err
    assert [path.name for path in place.iterdir()] == [".out.partial"]
    again = subprocess.run([*command, str(place / "out")], capture_output=True, text=True, check=False, env=env)
    assert again.returncode == 0 and "block 1/" not in again.stderr
    if name == "SIGINT":
        subprocess.run([*command, str(tmp_path / "whole")], capture_output=True, check=True, env=env)
        assert content(place / "out") == content(tmp_path / "whole")
