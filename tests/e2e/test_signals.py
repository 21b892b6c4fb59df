"""A run that is told to stop, in whichever way, says so and leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Zoo = Callable[..., Path]


def _heed() -> None:
    """Undo what a shell does to background jobs and `nohup` to everything: their children ignore these signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_in_the_middle_leaves_nothing(zoo: Zoo, calibration: Path, tmp_path: Path, name: str) -> None:
    place = tmp_path / "place"
    command = [sys.executable, "-m", "quantkit", "quantize", str(zoo("llama", num_hidden_layers=48))]
    options = [
        "-o",
        str(place / "out"),
        "--group-size",
        "32",
        "--method",
        "awq+gptq",
        "--calibration",
        str(calibration),
    ]
    place.mkdir()

    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *options], **pipes, preexec_fn=_heed) as process:  # noqa: PLW1509  # no threads here
        assert process.stderr is not None
        # Python drops an interrupt that falls into a callback of its garbage collector, as while modules are imported
        assert any(line.startswith("block 1/") for line in process.stderr)
        assert len(list(place.iterdir())) == 1
        process.send_signal(getattr(signal, name))
        out, err = process.communicate(timeout=60)

    assert process.returncode == 130 and out == ""
    assert "error: interrupted" in err and "Traceback" not in err
    assert list(place.iterdir()) == []
