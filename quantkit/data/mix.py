"""Named recipes, `calibration/NAME.yaml`: which sources to calibrate on and in which shares. Reads no data itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.data.builtin import calibration_root
from quantkit.data.rows import Document
from quantkit.errors import UsageError

_MIX_KEYS = ("sources", "stream")
_PART_KEYS = ("source", "split", "column", "share")


@dataclass(frozen=True, slots=True)
class Part:
    """One source of a mix; `share` is its relative part of the rows, None where the mix states no shares."""

    source: str
    split: str | None = None
    column: str | None = None
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Mix:
    """A named recipe. `stream`: all documents are one running text; None leaves it to the sources."""

    path: Path
    parts: tuple[Part, ...]
    stream: bool | None = None


def mix_names() -> list[str]:
    """List the recipes that come with quantkit."""
    try:
        return sorted(path.stem for path in calibration_root().glob("*.yaml"))
    except UsageError:
        return []


def read_mix(path: Path) -> Mix:
    """Read a recipe.

    Raises:
        UsageError: the file is not the YAML of a recipe; the message names the file and the key.
    """
    import yaml

    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"recipe `{path}` cannot be read: {error}", "check that it is UTF-8 YAML") from error
    _check_keys(data, _MIX_KEYS, path, "a recipe")
    sources, stream = data.get("sources"), data.get("stream")
    if not isinstance(sources, list) or not sources:
        raise UsageError(f"recipe `{path}` lists no `sources`", "add a list under `sources:`")
    if stream is not None and not isinstance(stream, bool):
        raise UsageError(f"recipe `{path}`: `stream` is `{stream}`", "write true or false")
    parts = tuple(_part(item, path) for item in sources)
    if len({part.share is None for part in parts}) > 1:
        raise UsageError(f"recipe `{path}`: some sources have a `share`, others none", "give every source a share")
    return Mix(path, parts, stream)


def _part(item: Any, path: Path) -> Part:
    _check_keys(item, _PART_KEYS, path, "a source")
    for key in ("source", "split", "column"):
        if not isinstance(item.get(key, "" if key != "source" else None), str):
            raise UsageError(f"recipe `{path}`: a source's `{key}` is `{item.get(key)}`", "write a name")
    share = item.get("share")
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if "share" in item and not (number and 0 < share < float("inf")):
        raise UsageError(f"recipe `{path}`: a `share` is `{share}`", "write a positive number")
    return Part(item["source"], item.get("split"), item.get("column"), float(share) if number else None)


def _check_keys(data: Any, known: Sequence[str], path: Path, what: str) -> None:
    keys = f"{what} has the keys {', '.join(known)}"
    if not isinstance(data, dict):
        raise UsageError(f"recipe `{path}`: {what} is not a mapping", keys)
    unknown = [str(key) for key in data if key not in known]
    if unknown:
        raise UsageError(f"recipe `{path}` has the unknown key `{unknown[0]}`", keys)


def blend(sources: Sequence[Sequence[Document]], shares: Sequence[float]) -> tuple[Document, ...]:
    """Interleave sources so that every prefix holds about their shares; end when the next one to give has run dry."""
    taken = [0] * len(sources)
    blended: list[Document] = []
    while True:
        k = min(range(len(sources)), key=lambda i: ((taken[i] + 1) / shares[i], i))
        if taken[k] == len(sources[k]):
            return tuple(blended)
        blended.append(sources[k][taken[k]])
        taken[k] += 1
