"""`quantkit convert`: write a quantized checkpoint in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.console import Console
from quantkit.recipe import FORMAT_NAMES, Recipe

_DEFAULT = Recipe().max_shard_size

Source = Annotated[str, typer.Argument(metavar="SRC", help="Quantized checkpoint folder, or a hub name")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write", metavar="FOLDER")]
Format = Annotated[str, typer.Option("--format", help=f"One of {', '.join(FORMAT_NAMES)}", metavar="NAME")]
MaxShardSize = Annotated[
    str, typer.Option("--max-shard-size", help=f"Of one file (default {_DEFAULT})", metavar="SIZE", show_default=False)
]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the checkpoint")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is in the folder")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print tensors as they are written, and tracebacks")]


def convert(
    src: Source,
    out: Out,
    format: Format,
    max_shard_size: MaxShardSize = _DEFAULT,
    trust_remote_code: Trust = False,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Write a quantized checkpoint in another format, with the same codes.

    quantkit convert ./llama-8b-w4 -o ./llama-8b-gptq --format gptq
    """
    from quantkit.convert import convert as run
    from quantkit.verify import Verdict, require_verified

    verdicts: list[Verdict] = []

    def verify(written: Path, source: Path) -> None:
        verdicts.append(require_verified(written, source, trust_remote_code=trust_remote_code))

    console = Console.open(quiet=quiet, verbose=verbose)
    with console.progress("tensor") as emit:
        converted = run(
            src,
            out,
            format,
            overwrite=overwrite,
            max_shard_size=max_shard_size,
            trust_remote_code=trust_remote_code,
            verify=verify,
            emit=emit,
        )
    for line in (*converted.summary(), *(verdict.line() for verdict in verdicts)):
        console.line(line)
    console.result(converted.to_json() if json else {}, [str(out)], as_json=json)
    return 0
