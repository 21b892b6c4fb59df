"""`quantkit report`: the page of one or several artifacts. The rendering is the library's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.console import Console
from quantkit.errors import ResourceError

Outs = Annotated[list[Path], typer.Argument(metavar="OUT...", help="Folders that `quantkit quantize` wrote")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Page to write", metavar="FILE")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only")]


def report(outs: Outs, output: Output = Path("report.html"), json: Json = False, quiet: Quiet = False) -> int:
    """Write one page about one or several artifacts, from what was measured when they were made.

    quantkit report ./llama-8b-awq ./llama-8b-gptq -o compare.html
    """
    from quantkit.report.page import render
    from quantkit.report.prove import write_text
    from quantkit.report.results import Result, verdict

    results = [Result.read(out) for out in outs]
    try:
        write_text(output, render(results))
    except OSError as problem:
        raise ResourceError(f"`{output}` cannot be written: {problem.strerror}", "name another file") from problem
    console = Console.open(quiet=quiet)
    for result in results:
        console.line(f"{result.name}: {verdict(result)}")
    value = {"page": str(output), "results": [result.to_json() for result in results]}
    console.result(value if json else {}, [str(output)], as_json=json)
    return 0
