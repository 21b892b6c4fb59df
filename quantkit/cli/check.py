"""`quantkit check`: what engines load, and on which kernels, from config.json and headers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.console import Console, aligned
from quantkit.recipe import FORMAT_NAMES, KV_CACHES, TARGETS, Recipe, check_choice

if TYPE_CHECKING:
    from quantkit.check import Judgement
    from quantkit.check.subject import Subject

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder, or hub name, of a plain or quantized checkpoint")]
Target = Annotated[str | None, typer.Option("--target", help=f"{', '.join(TARGETS)} (default: a line for each)")]
Tp = Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks")]
Format = Annotated[
    list[str] | None,
    typer.Option("--format", help=f"{', '.join(FORMAT_NAMES)}; repeatable (default: all that the engine takes)"),
]
Bits = Annotated[int | None, typer.Option("--bits", help="Width of a code, 4 or 8 (default 4)")]
GroupSize = Annotated[int | None, typer.Option("--group-size", help="Inputs per scale, or -1 (default 128)")]
Symmetric = Annotated[bool | None, typer.Option("--symmetric/--asymmetric", help="Fixed (default) or free zero points")]
Ignore = Annotated[
    list[str] | None, typer.Option("--ignore", help="Linears to keep in 16 bit; repeatable", metavar="PATTERN")
]
Override = Annotated[list[str] | None, typer.Option("--override", help="'PATTERN: bits=8'; repeatable", metavar="TEXT")]
KvCache = Annotated[str | None, typer.Option("--kv-cache", help=f"With its scales: {' or '.join(KV_CACHES)}")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print every linear, sources of facts, and tracebacks")]


def check(
    model: Model,
    target: Target = None,
    tp: Tp = 1,
    format: Format = None,
    bits: Bits = None,
    group_size: GroupSize = None,
    symmetric: Symmetric = None,
    ignore: Ignore = None,
    override: Override = None,
    kv_cache: KvCache = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Tell what an engine loads of a model, and on which kernels; exit code 1 when it loads in none of the formats.

    quantkit check ./llama-8b

    quantkit check ./llama-8b --target vllm --tp 2 --group-size 64

    quantkit check ./llama-8b-w4 --target sglang
    """
    if target is not None:
        check_choice("target", target, TARGETS)
    given = {
        "bits": bits,
        "group_size": group_size,
        "symmetric": symmetric,
        "ignore": ignore or None,
        "override": override or None,
        "kv_cache": kv_cache,
    }
    recipe = Recipe().merged(**given, format=format or None, target=target or TARGETS[0], tp=tp).validate()

    from quantkit.check.subject import Subject
    from quantkit.engines import ENGINES

    console = Console.open(verbose=verbose)
    with console.progress() as emit:
        subject = Subject.open(model, recipe, emit)
    engines = [target] if target else [name for name in TARGETS if tp == 1 or ENGINES[name].splits]
    found = {name: subject.judge_all(format or (), name, tp) for name in engines}
    lines = [_header(model, subject), *(_detail(found[target], verbose) if target else _overview(found))]
    console.result(_to_json(model, subject, found) if json else {}, lines, as_json=json)
    return 0 if any(each.loads for judgements in found.values() for each in judgements) else 1


def _header(model: str, subject: Subject) -> str:
    counts: dict[str, int] = {}
    for scheme in subject.schemes.values():
        what = str(scheme) if scheme else "16 bit"
        counts[what] = counts.get(what, 0) + 1
    state = f"quantized as {subject.stored}" if subject.stored else "to be quantized"
    return f"{model}, {state}: {'; '.join(f'{count} linears {what}' for what, count in counts.items())}"


def _detail(found: list[Judgement], every: bool) -> list[str]:
    """The best format in full, and of the others what is not the same."""
    best = found[0]
    lines = [f"{best.title}{f', {best.tp} tensor-parallel ranks' if best.tp > 1 else ''}", ""]
    reasons = best.summary(every=every)[1:]
    for judgement in found:
        first, *rest = judgement.summary(every=every)
        same = judgement is not best and rest == reasons
        lines += [f"{first}, as above"] if same and rest else [first, *rest]
    return lines


def _overview(found: dict[str, list[Judgement]]) -> list[str]:
    rows = []
    for name, judgements in found.items():
        for judgement in judgements:
            kernels = ", ".join(f"{count} on {kernel}" for kernel, count in judgement.kernels.items())
            state = ("loads", kernels) if judgement.loads else ("does not load", f"nearest: {judgement.hint}")
            rows.append((name, judgement.format, *state))
    alone = [name for name in TARGETS if name not in found]
    notes = [f"note: {name} has no tensor parallelism for quantized models" for name in alone]
    return ["", *aligned(rows, left=range(4)), *notes, "", "add `--target` for reasons"]


def _to_json(model: str, subject: Subject, found: dict[str, list[Judgement]]) -> dict[str, Any]:
    return {
        "model": model,
        "stored": subject.stored,
        "schemes": {name: str(scheme) if scheme else None for name, scheme in subject.schemes.items()},
        "loads": {name: any(each.loads for each in judgements) for name, judgements in found.items()},
        "judgements": [each.to_json() for judgements in found.values() for each in judgements],
    }
