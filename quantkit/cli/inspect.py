"""`quantkit inspect`: say what a checkpoint holds, from its headers."""

from __future__ import annotations

from typing import Annotated

import typer

from quantkit.cli.console import Console

Path_ = Annotated[str, typer.Argument(metavar="PATH", help="Checkpoint folder, packed or not, or a hub name")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the checkpoint")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print tracebacks")]


def inspect(path: Path_, trust_remote_code: Trust = False, json: Json = False, verbose: Verbose = False) -> int:
    """Print a checkpoint's layers, schemes and sizes.

    quantkit inspect ./llama-8b-w4
    """
    from quantkit.inspection import inspect as look

    found = look(path, trust_remote_code=trust_remote_code)
    Console.open(verbose=verbose).result(found.to_json() if json else {}, found.summary(), as_json=json)
    return 0
