"""Each row of the architecture imports only from rows below it, and siblings never import each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import quantkit

ROOT = Path(quantkit.__file__).parent
ROWS: tuple[tuple[str, ...], ...] = (  # lowest first
    ("errors", "events", "gpus", "units"),
    ("scheme",),
    ("patterns",),
    ("recipe",),
    ("qweight", "group"),
    ("ops", "device"),
    ("methods", "formats", "engines"),
    ("checkpoint", "blocks", "data", "kernels"),
    ("weights",),
    ("artifact", "check", "fit", "convert", "verify", "runtime"),
    ("assignment",),
    ("plan",),
    ("record", "working", "inspection"),
    ("progress",),
    ("pipeline", "eval"),
    ("report",),
    ("cli",),
)
ROW = {name: index for index, row in enumerate(ROWS) for name in row}
FACE = ("__init__", "__main__")  # the package's own face, which may name anything


def part_of(path: Path) -> str:
    """The first component below quantkit/: a package or a module."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and part of every import of quantkit, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            base = node.module or ""
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "quantkit" else [base]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "quantkit" and len(parts) > 1 and not parts[1].startswith("__"):
                yield node.lineno, parts[1]


SOURCES = sorted(path for path in ROOT.rglob("*.py") if part_of(path) not in FACE)


def test_every_part_has_a_row() -> None:
    assert {part_of(path) for path in SOURCES} <= set(ROW)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    here = part_of(path)

    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {here} imports {there}"
        for line, there in imported(path)
        if there != here and ROW[there] >= ROW[here]
    ]

    assert wrong == []
