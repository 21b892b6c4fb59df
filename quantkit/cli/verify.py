"""`quantkit verify`: read an artifact again and judge it."""

from __future__ import annotations

from typing import Annotated

import typer

from quantkit.cli.console import Console

Path_ = Annotated[str, typer.Argument(metavar="PATH", help="Artifact folder, or a hub name")]
Against = Annotated[str | None, typer.Option("--against", help="Checkpoint it was made from", metavar="MODEL")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the checkpoint")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the verdict and errors only")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print tensors as they are read, and tracebacks")]


def verify(
    path: Path_,
    against: Against = None,
    trust_remote_code: Trust = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Read an artifact again and check every tensor; exit code 1 when something is wrong.

    quantkit verify ./llama-8b-w4
    quantkit verify ./llama-8b-w4 --against meta-llama/Llama-3.1-8B
    """
    from quantkit.verify import verify as look

    console = Console.open(quiet=quiet, verbose=verbose)
    with console.progress("tensor") as emit:
        verdict = look(path, against, trust_remote_code=trust_remote_code, emit=emit)
    console.result(verdict.to_json() if json else {}, verdict.summary(), as_json=json)
    return 0 if verdict.ok else 1
