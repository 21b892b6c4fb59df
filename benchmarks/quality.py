"""Perplexity and cost of quantizations of one checkpoint, as a table.

    python benchmarks/quality.py MODEL --calibration valid.txt --test test.txt --preset one-quick-case
    python benchmarks/quality.py MODEL --calibration valid.txt --test test.txt \
        --case method=awq,grid=asymmetric,group=64,samples=32,seq-len=512,test-tokens=20000

Each case runs `quantkit quantize` and `quantkit eval perplexity` as processes of their own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from measured import Cost, markdown, quantkit

METHODS = ("rtn", "gptq", "awq", "awq+gptq")
GRIDS = ("symmetric", "asymmetric")


@dataclass(frozen=True, slots=True)
class Case:
    """One quantization and how it is measured."""

    method: str = "gptq"
    grid: str = "asymmetric"
    group: int = 64
    samples: int = 16
    seq_len: int = 512
    test_tokens: int = 10_240


PRESETS: dict[str, tuple[Case, ...]] = {
    # a minute: does it run at all
    "one-quick-case": (Case("rtn", samples=4, seq_len=256, test_tokens=2_048),),
    "every-method-8k-calibration-tokens": tuple(Case(method) for method in METHODS),
    "every-method-and-grid-16k-calibration-tokens": tuple(
        Case(method, grid, samples=32, test_tokens=20_000) for grid in GRIDS for method in METHODS
    ),
    "gptq-more-calibration-tokens": tuple(
        Case("gptq", "symmetric", samples=samples, test_tokens=20_000) for samples in (8, 16, 32, 64, 128)
    ),
    "gptq-group-sizes": tuple(
        Case("gptq", grid, group, samples=32, test_tokens=20_000) for grid in GRIDS for group in (32, 64, 96, 192, -1)
    ),
}


def main() -> int:
    args = arguments()
    cases = [*PRESETS.get(args.preset, ()), *args.case]
    if not cases:
        print("error: nothing to measure\n\nhint: give --preset or --case", file=sys.stderr)
        return 2
    work = Path(tempfile.mkdtemp(prefix="quantkit-quality-", dir=args.work))
    try:
        plain = {tokens: evaluate(args, args.model, tokens)[0] for tokens in {case.test_tokens for case in cases}}
        results = [measure(args, case, work / str(i), plain[case.test_tokens]) for i, case in enumerate(cases)]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps(results, indent=1) if args.json else report(args, plain, results))
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0], epilog=f"presets: {', '.join(PRESETS)}"
    )
    parser.add_argument("model", type=existing, help="checkpoint folder, 16 bit")
    parser.add_argument("--calibration", type=existing, required=True, help="text file to calibrate on")
    parser.add_argument("--test", type=existing, required=True, help="text file to measure on; never the same text")
    parser.add_argument("--preset", choices=PRESETS, metavar="NAME", help="a list of cases")
    parser.add_argument("--case", type=read_case, action="append", default=[], metavar="KEY=VALUE,…", help=case_help())
    parser.add_argument("--window", type=int, default=512, help="tokens of an evaluation window (default 512)")
    parser.add_argument("--dtype", default="float32", help="of the evaluation (default float32)")
    parser.add_argument("--work", type=existing, help="folder for the artifacts, each removed when it is measured")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def existing(text: str) -> Path:
    path = Path(text).expanduser().resolve()
    if not path.exists():
        raise argparse.ArgumentTypeError(f"`{text}` does not exist")
    return path


def case_help() -> str:
    defaults = (f"{field.name.replace('_', '-')}={field.default}" for field in fields(Case))
    return f"one more case; what is left out is {','.join(defaults)}"


def read_case(text: str) -> Case:
    """Read `method=awq,group=64`."""
    given: dict[str, Any] = {}
    for item in text.split(","):
        key, _, value = item.partition("=")
        name = key.strip().replace("-", "_")
        if name not in {field.name for field in fields(Case)}:
            raise argparse.ArgumentTypeError(f"`{key}` is none of {', '.join(field.name for field in fields(Case))}")
        given[name] = value.strip() if name in ("method", "grid") else int(value)
    case = replace(Case(), **given)
    if case.grid not in GRIDS:
        raise argparse.ArgumentTypeError(f"`{case.grid}` is none of {', '.join(GRIDS)}")
    return case


def evaluate(args: argparse.Namespace, model: Path, tokens: int) -> tuple[dict[str, Any], Cost]:
    options = ["--max-tokens", str(tokens), "--window", str(args.window), "--dtype", args.dtype, "--json", "--quiet"]
    cost = quantkit(["eval", "perplexity", model, "--data", args.test, *options])
    return json.loads(cost.output), cost


def measure(args: argparse.Namespace, case: Case, out: Path, plain: dict[str, Any]) -> dict[str, Any]:
    """Quantize and evaluate one case; the artifact is removed."""
    sizes = ["--group-size", str(case.group), "--samples", str(case.samples), "--seq-len", str(case.seq_len)]
    options = ["--method", case.method, f"--{case.grid}", *sizes, "--calibration", str(args.calibration)]
    cost = quantkit(["quantize", args.model, "-o", out, *options, "--no-eval", "--quiet"])
    found, evaluation = evaluate(args, out, case.test_tokens)
    record = json.loads((out / "quantkit.json").read_text(encoding="utf-8"))
    shutil.rmtree(out)
    result = {
        **asdict(case),
        "calibration_tokens": record["calibration"]["tokens"],
        "perplexity": found["perplexity"],
        "stderr": found["perplexity"] * found["stderr"],
        "ratio": found["perplexity"] / plain["perplexity"],
        "tokens_scored": found["tokens"],
        "cpu_seconds": cost.cpu,
        "wall_seconds": cost.wall,
        "peak_bytes": cost.peak,
        "evaluation_cpu_seconds": evaluation.cpu,
        "output_bytes": record["output"]["bytes"],
        "fallbacks": len(record["fallbacks"]),
        "plain_perplexity": plain["perplexity"],
    }
    print("  " + "  ".join(row(result)), file=sys.stderr, flush=True)
    return result


HEADER = (
    *("method", "grid", "group", "calibration", "test tokens", "perplexity", "ratio"),
    *("CPU", "wall", "peak", "size", "fallbacks"),
)


def row(result: dict[str, Any]) -> list[str]:
    return [
        result["method"],
        result["grid"],
        str(result["group"]),
        f"{result['samples']} x {result['seq_len']}",
        f"{result['test_tokens']:,}",
        f"{result['perplexity']:.3f} ± {result['stderr']:.2f}",
        f"{result['ratio']:.4f}",
        f"{result['cpu_seconds']:.0f} s",
        f"{result['wall_seconds']:.0f} s",
        f"{result['peak_bytes'] / 1e6:,.0f} MB",
        f"{result['output_bytes'] / 1e6:,.0f} MB",
        str(result["fallbacks"]),
    ]


def report(args: argparse.Namespace, plain: dict[int, dict[str, Any]], results: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"{args.model.name}, unquantized: perplexity {found['perplexity']:.3f} over {tokens:,} test tokens"
        for tokens, found in sorted(plain.items())
    ]
    return "\n".join([*lines, "", markdown(HEADER, [row(result) for result in results])])


if __name__ == "__main__":
    sys.exit(main())
