"""`quantkit fit`: what a model takes of a GPU, in 16 bit and quantized, from its config and headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.console import Console, aligned
from quantkit.errors import UsageError
from quantkit.gpus import GPUS, Gpu
from quantkit.patterns import closest
from quantkit.scheme import Scheme
from quantkit.units import gigabytes

if TYPE_CHECKING:
    from quantkit.fit.serving import Fit, Load, Sizes

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder with config.json, and weights or none")]
GpuName = Annotated[str | None, typer.Option("--gpu", help="Such as h100-80gb (default: a line for each)")]
Gpus = Annotated[int, typer.Option("--gpus", help="Tensor-parallel GPUs")]
Context = Annotated[int, typer.Option("--context", help="Tokens of a sequence, prompt and answer")]
Concurrency = Annotated[int, typer.Option("--concurrency", help="Sequences at a time")]
Bits = Annotated[int | None, typer.Option("--bits", help="Width of a code, 4 or 8 (default 4)")]
GroupSize = Annotated[int | None, typer.Option("--group-size", help="Inputs per scale, or -1 (default 128)")]
Symmetric = Annotated[bool | None, typer.Option("--symmetric/--asymmetric", help="Fixed (default) or free zero points")]
Utilization = Annotated[float, typer.Option("--utilization", help="Part of the memory the engine may use")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run the checkpoint's own code")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print tracebacks")]

BOUND = "tokens/s is the most that memory bandwidth allows with full contexts: an upper bound, not a prediction"


def fit(
    model: Model,
    gpu: GpuName = None,
    gpus: Gpus = 1,
    context: Context = 8192,
    concurrency: Concurrency = 32,
    bits: Bits = None,
    group_size: GroupSize = None,
    symmetric: Symmetric = None,
    utilization: Utilization = 0.9,
    trust_remote_code: Trust = False,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Print whether a model fits a GPU, for how many sequences, and how fast it can decode at most.

    quantkit fit ./llama-70b --gpu h100-80gb --context 8192 --concurrency 32

    quantkit fit ./llama-70b --gpus 2
    """
    chosen = {gpu.lower(): _gpu(gpu)} if gpu else GPUS
    given = {"bits": bits, "group_size": group_size, "symmetric": symmetric}
    changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    scheme = Scheme(**changed) if changed else None

    from quantkit.fit.measure import measure
    from quantkit.fit.serving import Load
    from quantkit.fit.serving import fit as fit_on

    load = Load(context, concurrency, gpus, utilization)
    sizes = measure(Path(model), scheme, trust_remote_code=trust_remote_code)
    fits = {name: fit_on(sizes, load, each) for name, each in chosen.items()}
    notes = _notes(sizes, load, chosen if gpu else {})
    lines = [
        *_header(model, sizes, load),
        *(_detail(load, chosen[gpu.lower()], fits[gpu.lower()]) if gpu else _overview(fits)),
        *(f"note: {note}" for note in notes),
    ]
    result = _to_json(model, sizes, load, fits) | {"notes": notes} if json else {}
    Console.open(verbose=verbose).result(result, lines, as_json=json)
    return 0 if not gpu or any(each.sequences >= concurrency for each in fits[gpu.lower()]) else 1


def _gpu(name: str) -> Gpu:
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    near = closest(name.lower(), GPUS)
    known = f"known are {', '.join(GPUS)}"
    raise UsageError(f"`{name}` is no known GPU", f"did you mean `{near}`? {known}" if near else known)


def _header(model: str, sizes: Sizes, load: Load) -> list[str]:
    from quantkit.fit.serving import CACHES

    cache = sizes.cache
    rows = [
        ("weights", *(f"{name} {gigabytes(each.total)}" for name, each in sizes.weights.items()), sizes.packing),
        ("cache of a token", *(f"{name} {cache.per_token(size):,} bytes" for name, size in CACHES.items()), ""),
        (
            f"cache of {load.context:,} tokens",
            *(f"{name} {gigabytes(cache.per_sequence(load.context, size))}" for name, size in CACHES.items()),
            "",
        ),
    ]
    return [
        f"{Path(model).resolve().name}: {sizes.parameters / 1e9:.2f} B parameters, {sum(cache.layers.values())} layers"
        f" with a cache, {load.gpus} {'GPU' if load.gpus == 1 else 'GPUs'}",
        *aligned(rows, left=(0, 1, 2, 3)),
        "",
    ]


def _detail(load: Load, gpu: Gpu, fits: Sequence[Fit]) -> list[str]:
    from quantkit.fit.serving import RESERVE

    room = (
        f"{gpu.title}: {gigabytes(gpu.memory)}, {gpu.gb_per_s:,} GB/s; {load.utilization:g} of it less"
        f" {gigabytes(RESERVE)} for activations and the runtime leaves {gigabytes(load.room(gpu))}"
    )
    rows = [("weights", "", "cache", f"for {load.concurrency}", "sequences fit", "tokens/s: 1 sequence", "all at once")]
    for each in fits:
        fit = f"{each.sequences:,}" if each.weights_fit else "does not fit"
        speed = (f"{each.single:,.0f}", f"{each.batched:,.0f} ({each.batch})") if each.batch else ("-", "-")
        sized = (each.weights, gigabytes(each.weight_bytes), each.cache, gigabytes(each.cache_bytes))
        rows.append((*sized, fit, *speed))
    per = ["sizes are per GPU"] if load.gpus > 1 else []
    return [room, *per, *aligned(rows, left=(0, 2)), "", BOUND]


def _overview(fits: dict[str, tuple[Fit, ...]]) -> list[str]:
    first = next(iter(fits.values()))
    rows = [("sequences that fit", "memory", "GB/s", *(f"{each.weights} + {each.cache}" for each in first))]
    for name, each in fits.items():
        counts = (f"{fit.sequences:,}" if fit.weights_fit else "-" for fit in each)
        rows.append((name, gigabytes(GPUS[name].memory), f"{GPUS[name].gb_per_s:,}", *counts))
    return [*aligned(rows, left=(0,)), "columns: weights + cache; - where the weights alone do not fit"]


def _notes(sizes: Sizes, load: Load, chosen: dict[str, Gpu]) -> list[str]:
    notes = list(sizes.notes)
    if sizes.positions and load.context > sizes.positions:
        notes.append(f"{load.context:,} tokens are more than the {sizes.positions:,} positions of the model")
    if sizes.routing and chosen:
        notes.append(
            f"a token uses {sizes.routing.active} of {sizes.routing.experts} experts; a batch is taken to spread evenly"
        )
    notes += [
        f"{gpu.title} has no FP8 arithmetic: an FP8 cache saves memory and is converted when read"
        for gpu in chosen.values()
        if not gpu.fp8
    ]
    return notes


def _to_json(model: str, sizes: Sizes, load: Load, fits: dict[str, tuple[Fit, ...]]) -> dict[str, Any]:
    from quantkit.fit.serving import CACHES, PAGE, RESERVE

    return {
        "model": model,
        "parameters": sizes.parameters,
        "packing": sizes.packing,
        "weights": {name: asdict(each) | {"total": each.total} for name, each in sizes.weights.items()},
        "cache": {
            "page_tokens": PAGE,
            "layers": [{"window": window, "count": count} for window, count in sizes.cache.layers.items()],
            "bytes_per_token": {name: sizes.cache.per_token(size) for name, size in CACHES.items()},
            "bytes_per_sequence": {name: sizes.cache.per_sequence(load.context, size) for name, size in CACHES.items()},
        },
        "routing": asdict(sizes.routing) if sizes.routing else None,
        "load": asdict(load),
        "reserve_bytes": RESERVE,
        "gpus": {
            name: {
                "title": GPUS[name].title,
                "memory_bytes": GPUS[name].memory,
                "room_bytes": load.room(GPUS[name]),
                "bandwidth": GPUS[name].bandwidth,
                "bandwidth_source": GPUS[name].source,
                "fp8": GPUS[name].fp8,
                "fits": [asdict(fit) for fit in each],
            }
            for name, each in fits.items()
        },
    }
