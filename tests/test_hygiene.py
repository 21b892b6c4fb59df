"""What must hold for every file, and what importing quantkit may not do."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import quantkit

ROOT = Path(quantkit.__file__).parent
PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))
LIMITS = PROJECT["tool"]["quantkit"]["limits"]
SOURCES = sorted(ROOT.rglob("*.py"))
CONFINED = {
    "transformers": ("blocks/", "runtime.py", "data/tokens.py"),
    "datasets": ("data/corpus.py",),
    "typer": ("cli/",),
    "rich": ("cli/",),
}


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and top-level package of every import, also inside functions."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module.split(".")[0]


def test_importing_loads_nothing_heavy_prints_nothing_and_leaves_the_process_alone() -> None:
    script = (
        "import json, os, sys, warnings, logging, signal\n"
        "def state():\n"
        "    return [dict(os.environ), list(warnings.filters), logging.root.level, len(logging.root.handlers),\n"
        "            str(signal.getsignal(signal.SIGINT)), sys.excepthook is sys.__excepthook__, os.getcwd()]\n"
        "before = state()\n"
        "import quantkit\n"
        "quantkit.Recipe, quantkit.Scheme\n"
        "same = state() == before\n"
        "heavy = sorted({name.split('.')[0] for name in sys.modules} & {'torch', 'transformers', 'numpy', 'datasets',"
        " 'rich', 'typer', 'yaml', 'safetensors'})\n"
        "sys.stdout.write(json.dumps([same, heavy]))\n"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert json.loads(done.stdout) == [True, []]
    assert done.stderr == ""


def test_the_public_names_are_listed_and_unknown_ones_are_refused() -> None:
    assert set(quantkit.__all__) <= set(dir(quantkit))
    assert quantkit.Scheme().bits == 4
    with pytest.raises(AttributeError, match="no attribute `nothing`"):
        _ = quantkit.nothing


def test_the_version_is_the_packages() -> None:
    assert quantkit.__version__ == PROJECT["project"]["version"]


@pytest.mark.parametrize("path", SOURCES, ids=short)
def test_files_and_functions_stay_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    functions = [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [f"{each.name}: {size}" for each in functions if (size := _length(each)) > LIMITS["function_lines"]]

    assert lines <= LIMITS["file_lines"]
    assert long == []


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


@pytest.mark.parametrize("path", SOURCES, ids=short)
def test_libraries_stay_where_they_belong(path: Path) -> None:
    wrong = [
        f"{short(path)}:{line}: {package}"
        for line, package in imports(tree(path))
        if package in CONFINED and not short(path).startswith(CONFINED[package])
    ]

    assert wrong == []


@pytest.mark.parametrize("path", SOURCES, ids=short)
def test_only_the_command_line_catches_everything(path: Path) -> None:
    caught = [
        node.lineno
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler) and (node.type is None or _names(node.type) & {"Exception"})
    ]

    assert caught == [] or short(path) == "cli/app.py"


def _names(node: ast.expr) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


@pytest.mark.parametrize("path", SOURCES, ids=short)
def test_the_library_never_prints(path: Path) -> None:
    printed = [
        node.lineno
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]

    assert printed == [] or short(path).startswith("cli/")


def test_every_module_says_what_it_is() -> None:
    silent = [
        short(path)
        for path in SOURCES
        if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(tree(path))
    ]

    assert silent == []
