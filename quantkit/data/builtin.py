"""The text that comes with quantkit, so that calibration and evaluation need no network.

Calibration text is completed, where more of it is asked for, from the documentation and sources of the running
Python: the same version of Python gives the same text. Held-out text is never completed and never calibrated on.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from quantkit.errors import UsageError

BUILTIN = "builtin"
HELDOUT = "builtin-heldout"
SEPARATOR = "---"
# the head of a module is its documentation; whole modules would let a few large ones crowd out the others
MODULE_CHARACTERS = 16_000
# tests and their data, tables of numbers, what distributions add or leave out, and what pydoc already gives
_SKIPPED_PARTS = ("test", "_sysconfigdata", "sitecustomize", "usercustomize", "-packages", "config-")
# fmt: off
_SKIPPED = frozenset((
    "__pycache__", "__phello__", "idlelib", "turtledemo", "lib2to3", "distutils", "ensurepip", "msilib",
    "encodings", "pydoc_data", "lib-dynload", "entities.py", "stringprep.py",
))
# fmt: on


def calibration_root() -> Path:
    """Find the folder with the built-in text and the named recipes, in a wheel or in a checkout.

    Raises:
        UsageError: this installation has none.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_calibration", package.parent / "calibration"):
        if folder.is_dir():
            return folder
    raise UsageError("the built-in calibration text is not installed", "reinstall quantkit, or name a file of your own")


def calibration_texts() -> Iterator[str]:
    """Yield the built-in documents interleaved over the files, then the text of the running Python, lazily."""
    yield from _interleaved("text")
    yield from _python_texts()


def heldout_texts() -> Iterator[str]:
    """Yield the held-out documents, interleaved over the files."""
    yield from _interleaved("heldout")


def _interleaved(name: str) -> list[str]:
    """Order documents so that any prefix is varied: each file contributes evenly from its start to its end."""
    folder = calibration_root() / name
    files = [_documents(path) for path in sorted(folder.glob("*.txt"))]
    placed = [(i / len(texts), k, text) for k, texts in enumerate(files) for i, text in enumerate(texts)]
    if not placed:
        raise UsageError(f"the built-in text `{folder}` is missing", "reinstall quantkit, or name a file of your own")
    return [text for _, _, text in sorted(placed, key=lambda item: item[:2])]


def _documents(path: Path) -> list[str]:
    """Split a file at the lines that hold only the separator."""
    documents: list[list[str]] = [[]]
    for line in path.read_text("utf-8").split("\n"):
        if line.rstrip() == SEPARATOR:
            documents.append([])
        else:
            documents[-1].append(line)
    texts = ("\n".join(lines).strip() for lines in documents)
    return [text for text in texts if text]


def _python_texts() -> Iterator[str]:
    """Alternate prose (the language reference, as pydoc carries it) with source, while there is prose."""
    for prose, source in zip_longest(_topics(), _modules()):
        yield from (text for text in (prose, source) if text)


def _topics() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions ship it apart
        return
    for name in sorted(topics):
        yield topics[name].strip()


def _modules() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    for path in _sources(library):
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):  # a few modules declare another encoding
            continue
        if len(text) > MODULE_CHARACTERS:
            text = text[: text.rfind("\n", 0, MODULE_CHARACTERS)]
        if text := text.strip():
            yield text


def _sources(library: Path) -> Iterator[Path]:
    """Walk the modules in a fixed order, never into what is skipped: site-packages alone can hold 100,000 files."""
    for folder, folders, names in os.walk(library):
        folders[:] = sorted(name for name in folders if not _skipped(name))
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py") and not _skipped(name))


def _skipped(name: str) -> bool:
    return name in _SKIPPED or any(mark in name for mark in _SKIPPED_PARTS)
