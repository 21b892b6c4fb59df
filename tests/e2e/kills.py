"""Run the command line in processes that are killed, without paying for imports each time."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

OPERATIONS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")
TIMES = ("seconds", "peak_rss")  # all in quantkit.json that may differ between equal runs


def content(folder: Path) -> dict[str, Any]:
    """{file: its bytes}; of the record, all but what the clock and the memory of the process decide."""
    files: dict[str, Any] = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for name in files:
        if Path(name).name == "quantkit.json":
            files[name] = {key: value for key, value in json.loads(files[name]).items() if key not in TIMES}
    return files


class Server:
    """Starts runs in forks of a process that has imported everything."""

    def __init__(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the server starts; other tests work beside this one
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["zoo.models", "quantkit.pipeline", "transformers.models.llama.modeling_llama", "quantkit.cli.app"]
        )

    def run(
        self, arguments: list[str], *, kill_at: int = 0, kill_after: float | None = None, limit: int | None = None
    ) -> tuple[int, int]:
        """Run a command line.

        Args:
            kill_at: SIGKILL at this operation on a file, counted from 1; 0 never.
            kill_after: SIGKILL after so many seconds.
            limit: bytes that a file may have.

        Returns:
            The exit code, -9 of a killed process, and the number of operations on files it did.
        """
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_run, args=(arguments, kill_at, limit, theirs))
        process.start()
        theirs.close()
        if kill_after is not None:
            process.join(kill_after)
            process.kill()
        process.join()
        count = ours.recv() if process.exitcode != -signal.SIGKILL else 0
        assert process.exitcode is not None
        return process.exitcode, count


def _run(arguments: list[str], kill_at: int, limit: int | None, pipe: Connection) -> None:
    import resource

    from quantkit.cli.app import run

    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    count = 0

    def hook(event: str, given: tuple[Any, ...]) -> None:
        nonlocal count
        if event in OPERATIONS or (event == "open" and ".partial" in str(given[0])):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    code = run(arguments)
    pipe.send(count)
    pipe.close()
    os._exit(code)
