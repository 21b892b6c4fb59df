"""`quantkit eval`: measure a model. The measuring itself is the library's."""

from __future__ import annotations

from typing import Annotated

import typer

from quantkit.cli.console import Console, aligned
from quantkit.cli.verdicts import OUTPUT_FORMATS, MaxKl, MaxPerplexityIncrease, MaxSize, MinTop1, formatted, over_budget
from quantkit.errors import UsageError
from quantkit.recipe import check_choice, check_device
from quantkit.report.budgets import judge, read_budgets

DTYPES = ("auto", "float32", "bfloat16")

app = typer.Typer(help="Measure a model, packed or not")

MODEL, DATA, RESOURCES, OUTPUT = "Model", "Data", "Resources", "Output"
Path_ = Annotated[str, typer.Argument(metavar="PATH", help="Checkpoint folder, packed or not, or a hub name")]
Data = Annotated[str, typer.Option(help="builtin-heldout, a local file, or a dataset", rich_help_panel=DATA)]
Split = Annotated[str | None, typer.Option(help="Split of the dataset", rich_help_panel=DATA)]
Column = Annotated[str | None, typer.Option(help="Column with the text", rich_help_panel=DATA)]
Window = Annotated[int, typer.Option(help="Tokens the model sees at once", rich_help_panel=DATA)]
Stride = Annotated[int | None, typer.Option(help="Tokens between windows, if not the window", rich_help_panel=DATA)]
MaxTokens = Annotated[int | None, typer.Option(help="Stop after these", rich_help_panel=DATA)]
Dtype = Annotated[str, typer.Option(help=f"Of the arithmetic: {', '.join(DTYPES)}", rich_help_panel=RESOURCES)]
KvCache = Annotated[str | None, typer.Option(help="Simulate it: fp8", metavar="NAME", rich_help_panel=MODEL)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N", rich_help_panel=RESOURCES)]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run its code", rich_help_panel=RESOURCES)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object", rich_help_panel=OUTPUT)]
Reference = Annotated[str, typer.Option(help="What it was made of", metavar="MODEL", rich_help_panel=MODEL)]
Against = Annotated[
    str | None, typer.Option("--reference", help="Default: the first PATH", metavar="MODEL", rich_help_panel=MODEL)
]
Paths = Annotated[list[str], typer.Argument(metavar="PATH...", help="Checkpoint folders or hub names")]
FloorTokens = Annotated[int, typer.Option(help="For the 16-bit noise floor", rich_help_panel=DATA)]
OutputFormat = Annotated[str, typer.Option(help=", ".join(OUTPUT_FORMATS), metavar="NAME", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only", rich_help_panel=OUTPUT)]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print stages and tracebacks", rich_help_panel=OUTPUT)]


@app.command("perplexity")
def perplexity(
    path: Path_,
    kv_cache: KvCache = None,
    data: Data = "builtin-heldout",
    split: Split = None,
    column: Column = None,
    window: Window = 512,
    stride: Stride = None,
    max_tokens: MaxTokens = None,
    dtype: Dtype = "float32",
    device: Device = "auto",
    trust_remote_code: Trust = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Measure perplexity on held-out text: exp of the mean loss over non-overlapping windows.

    quantkit eval perplexity ./llama-8b-w4 --max-tokens 20000

    quantkit eval perplexity ./llama-8b-w4 --kv-cache fp8
    """
    _check(dtype, device, window, stride, max_tokens)
    from quantkit.eval.perplexity import perplexity as measure

    console = Console.open(quiet=quiet, verbose=verbose)
    with console.progress() as emit:
        found = measure(
            path,
            kv_cache=kv_cache,
            data=data,
            split=split,
            column=column,
            window=window,
            stride=stride,
            max_tokens=max_tokens,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            emit=emit,
        )
    console.result(found.to_json() if json else {}, found.summary(), as_json=json)
    return 0


@app.command("kl")
def kl(
    path: Path_,
    reference: Reference,
    data: Data = "builtin-heldout",
    split: Split = None,
    column: Column = None,
    window: Window = 512,
    stride: Stride = None,
    max_tokens: MaxTokens = None,
    floor_tokens: FloorTokens = 2048,
    dtype: Dtype = "float32",
    device: Device = "auto",
    trust_remote_code: Trust = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Measure how far a model's distributions are from its reference's, token by token.

    quantkit eval kl ./llama-8b-w4 --reference ./llama-8b --max-tokens 20000
    """
    _check(dtype, device, window, stride, max_tokens, floor_tokens)
    from quantkit.eval.compare import kl as measure

    console = Console.open(quiet=quiet, verbose=verbose)
    with console.progress() as emit:
        found = measure(
            path,
            reference,
            data=data,
            split=split,
            column=column,
            window=window,
            stride=stride,
            max_tokens=max_tokens,
            floor_tokens=floor_tokens,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            emit=emit,
        )
    console.result(found.to_json() if json else {}, found.summary(), as_json=json)
    return 0


@app.command("compare")
def compare(
    paths: Paths,
    reference: Against = None,
    data: Data = "builtin-heldout",
    split: Split = None,
    column: Column = None,
    window: Window = 512,
    stride: Stride = None,
    max_tokens: MaxTokens = None,
    floor_tokens: FloorTokens = 2048,
    dtype: Dtype = "float32",
    device: Device = "auto",
    trust_remote_code: Trust = False,
    max_perplexity_increase: MaxPerplexityIncrease = None,
    max_kl: MaxKl = None,
    min_top1: MinTop1 = None,
    max_size: MaxSize = None,
    output_format: OutputFormat = "text",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Compare several models with one reference over the same tokens, and print one table.

    quantkit eval compare ./llama-8b-awq ./llama-8b-gptq --reference ./llama-8b

    quantkit eval compare ./llama-8b ./llama-8b-w4 --max-kl 0.05 --min-top1 90% --output-format github
    """
    _check(dtype, device, window, stride, max_tokens, floor_tokens)
    check_choice("output_format", output_format, OUTPUT_FORMATS)
    budgets = read_budgets(max_perplexity_increase, max_kl, min_top1, max_size)
    from quantkit.eval.compare import compare as measure

    console = Console.open(quiet=quiet, verbose=verbose)
    with console.progress() as emit:
        found = measure(
            paths,
            reference=reference,
            data=data,
            split=split,
            column=column,
            window=window,
            stride=stride,
            max_tokens=max_tokens,
            floor_tokens=floor_tokens,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            emit=emit,
        )
    judged = [
        (each.path, [one.to_json() for one in judge(budgets, each, each.bytes_on_disk)]) for each in found.results
    ]
    if json or output_format in ("text", "json"):
        as_json = json or output_format == "json"
        lines = [] if as_json else [*aligned(found.rows(), left=(0,)), found.results[0].conditions.line()]
        value = found.to_json() | {"judged": dict(judged)}
        console.result(value, lines, as_json=as_json)
    else:
        console.data(formatted(output_format, judged))
    return 1 if over_budget(console, judged) else 0


def _check(
    dtype: str, device: str, window: int, stride: int | None, max_tokens: int | None, floor_tokens: int = 0
) -> None:
    """Refuse values out of range before anything is loaded."""
    check_choice("dtype", dtype, DTYPES)
    check_device(device)
    least = (
        ("window", window, 2),
        ("stride", stride, 1),
        ("max-tokens", max_tokens, 2),
        ("floor-tokens", floor_tokens, 0),
    )
    for name, value, smallest in least:
        if value is not None and value < smallest:
            raise UsageError(f"`--{name}` is {value}, and must be at least {smallest}")
    if stride is not None and stride > window:
        raise UsageError(f"`--stride` is {stride}, more than the window of {window}, so tokens would be skipped")
