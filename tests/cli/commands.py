"""Run a command line in a process of its own, and see what it imported."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

_SCRIPT = """
import json, sys
from quantkit.cli.app import run
code = run(sys.argv[1:])
heavy = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "transformers", "numpy", "datasets"})
sys.stderr.write("\\n" + json.dumps(heavy))
sys.exit(code)
"""


@dataclass(frozen=True)
class Done:
    """What a process left: exit code, both streams, and the large packages that it had imported."""

    code: int
    out: str
    err: str
    heavy: list[str]

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run_alone(*arguments: object) -> Done:
    """Run `quantkit ARGUMENTS` in a process of its own."""
    words = [str(each) for each in arguments]
    command = [sys.executable, "-c", _SCRIPT, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    err, _, heavy = done.stderr.rpartition("\n")
    return Done(done.returncode, done.stdout, err, json.loads(heavy))
