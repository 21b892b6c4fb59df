"""Print a table that compares measured models: the first one given is what the others are compared with.

quantkit eval perplexity MODEL --json > before.json
quantkit eval perplexity MODEL-AWQ --json > after.json
python examples/compare.py before.json after.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import quantkit

KIND = ("data", "digest", "tokens", "window", "stride", "dtype")  # what must agree for a comparison to mean anything


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path, help="outputs of `quantkit eval perplexity --json`")
    results = [json.loads(path.read_text(encoding="utf-8")) for path in parser.parse_args().results]
    different = [key for key in KIND if len({result[key] for result in results}) > 1]
    if different:
        print(f"error: the results were measured with different {', '.join(different)}", file=sys.stderr)
        return 2
    found = [quantkit.inspect(result["path"]).bytes_by_kind for result in results]
    sizes = [sum(kinds.values()) for kinds in found]
    print("\n".join(table(results, sizes)))
    # what no artifact packs is the same in all of them, so the plain model's linears are the rest of it
    for result, kinds in zip(results, found, strict=True):
        packed = sum(kinds.values()) - kinds["other"]
        if packed:
            linears = sizes[0] - kinds["other"]
            print(
                f"\n{name(result)}: linears {megabytes(linears)} → {megabytes(packed)}"
                f" ({linears / packed:.1f}x smaller); the rest stays as it was, {megabytes(kinds['other'])}"
            )
    first = results[0]
    print(f"perplexity over the same {first['tokens']:,} tokens of {first['data']}, windows of {first['window']}")
    return 0


def table(results: list[dict[str, Any]], sizes: list[int]) -> list[str]:
    """The rows as aligned lines, header first."""
    rows = [["", "perplexity", "ratio", "size"]]
    for result, size in zip(results, sizes, strict=True):
        value = result["perplexity"]
        rows.append(
            [
                name(result),
                f"{value:.2f} ± {value * result['stderr']:.2f}",
                f"{value / results[0]['perplexity']:.3f}",
                f"{megabytes(size)}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return [lines[0], "─" * len(lines[1]), *lines[1:]]


def name(result: dict[str, Any]) -> str:
    return Path(result["path"]).name


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


if __name__ == "__main__":
    sys.exit(main())
