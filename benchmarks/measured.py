"""Run a `quantkit` command as a process of its own, and say what it cost."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a command took.

    Attributes:
        output: its stdout.
        cpu: seconds of user time.
        wall: seconds on the clock.
        peak: largest resident memory, bytes.
    """

    output: str
    cpu: float
    wall: float
    peak: int


def quantkit(arguments: Sequence[str | Path]) -> Cost:
    """Run `quantkit ARGUMENTS`; its progress goes to our stderr. A failure ends the benchmark with its exit code."""
    command = [sys.executable, "-m", "quantkit", *map(str, arguments)]
    print("$ quantkit", *command[3:], file=sys.stderr, flush=True)
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        # from the repository's root, where `-m quantkit` works without an installation
        process = subprocess.Popen(command, stdout=output, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.monotonic() - started
        if process.returncode:
            sys.exit(f"error: exit code {process.returncode} from `{' '.join(command[2:])}`")
        output.seek(0)
        text = output.read()
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Cost(text, usage.ru_utime, wall, peak)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in (header, *rows)]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
