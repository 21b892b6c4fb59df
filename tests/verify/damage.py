"""Copy an artifact and damage one thing in it, with json and bytes alone. Imports nothing from quantkit.

A damage is a function of the folder. `sealed` damages are hidden from the digests, as a run that went wrong would be.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Damage = Callable[[Path], None]
WEIGHTS = "model.safetensors"
FORMATS = {"F16": "e", "F32": "f", "I32": "i", "I64": "q", "U8": "B"}  # of `struct`


@dataclass(frozen=True)
class Stored:
    """A tensor as a file has it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def numbers(self) -> list[Any]:
        return [each for (each,) in struct.iter_unpack(f"<{FORMATS[self.dtype]}", self.data)]

    def having(self, numbers: list[Any]) -> Stored:
        return replace(self, data=struct.pack(f"<{len(numbers)}{FORMATS[self.dtype]}", *numbers))


@dataclass(frozen=True)
class Row:
    """One line of a table of damages.

    Attributes:
        says: what is done.
        damage: does it.
        checks: that fail, and no others.
        name: of the tensor, linear or file that is named.
        words: in what is said about it.
        sealed: the digests are made to fit afterwards.
    """

    says: str
    damage: Damage
    checks: str
    name: str
    words: str
    sealed: bool = True

    def __str__(self) -> str:
        return self.says.replace(" ", "-")


def read(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file."""
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        low, high = entry["data_offsets"]
        found[name] = Stored(entry["dtype"], tuple(entry["shape"]), raw[start + low : start + high])
    return found


def write(file: Path, tensors: dict[str, Stored]) -> None:
    """Write a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, each in tensors.items():
        offsets = [len(data), len(data) + len(each.data)]
        header[name] = {"dtype": each.dtype, "shape": list(each.shape), "data_offsets": offsets}
        data += each.data
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def seal(path: Path) -> None:
    """Make the digests of quantkit.json those of the files."""
    record = json.loads((path / "quantkit.json").read_text())
    files = sorted(path.glob("*.safetensors"))
    record["output"]["sha256"] = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    (path / "quantkit.json").write_text(json.dumps(record))


def damaged(artifact: Path, tmp_path: Path, row: Row) -> Path:
    """A copy of an artifact with the damage of a row."""
    path = tmp_path / "copy"
    shutil.copytree(artifact, path)
    row.damage(path)
    if row.sealed:
        seal(path)
    return path


def both(*damages: Damage) -> Damage:
    """One damage after another."""

    def apply(path: Path) -> None:
        for each in damages:
            each(path)

    return apply


def tensor(name: str, change: Callable[[Stored], Stored]) -> Damage:
    """Change one tensor, in whatever file it is."""

    def apply(path: Path) -> None:
        for file in sorted(path.glob("*.safetensors")):
            tensors = read(file)
            if name in tensors:
                write(file, tensors | {name: change(tensors[name])})
                return
        raise KeyError(name)

    return apply


def drop(*names: str) -> Damage:
    """Take tensors out of the file."""

    def apply(path: Path) -> None:
        tensors = read(path / WEIGHTS)
        for name in names:
            del tensors[name]
        write(path / WEIGHTS, tensors)

    return apply


def add(name: str, stored: Stored) -> Damage:
    """Put one more tensor into the file."""
    return lambda path: write(path / WEIGHTS, read(path / WEIGHTS) | {name: stored})


def half(*shape: int) -> Stored:
    """A float16 tensor of ones."""
    count = math.prod(shape)
    return Stored("F16", shape, struct.pack(f"<{count}e", *[1.0] * count))


def set_number(name: str, index: int, value: Any) -> Damage:
    """Change one number of a tensor."""

    def change(stored: Stored) -> Stored:
        numbers = stored.numbers()
        numbers[index] = value
        return stored.having(numbers)

    return tensor(name, change)


def every_number(name: str, change: Callable[[Any], Any]) -> Damage:
    """Change all numbers of a tensor."""
    return tensor(name, lambda stored: stored.having([change(each) for each in stored.numbers()]))


def flip(name: str, mask: int = 0xFF, start: int = 0, stop: int | None = None) -> Damage:
    """Flip the bits of `mask` in some bytes of a tensor, in all of them unless said otherwise."""

    def change(stored: Stored) -> Stored:
        end = len(stored.data) if stop is None else stop
        middle = bytes(each ^ mask for each in stored.data[start:end])
        return replace(stored, data=stored.data[:start] + middle + stored.data[end:])

    return tensor(name, change)


def fill(name: str, start: int, stop: int, byte: int = 0) -> Damage:
    """Overwrite bytes of a tensor, as a hole in a file does."""
    return tensor(name, lambda s: replace(s, data=s.data[:start] + bytes([byte]) * (stop - start) + s.data[stop:]))


def as_dtype(name: str, dtype: str) -> Damage:
    """Say that a tensor has another dtype of the same size."""
    return tensor(name, lambda stored: replace(stored, dtype=dtype))


def as_shape(name: str, *shape: int) -> Damage:
    """Say that a tensor has another shape of the same size."""
    return tensor(name, lambda stored: replace(stored, shape=shape))


def json_file(file: str, change: Callable[[Any], Any]) -> Damage:
    """Change what a JSON file holds, in place."""

    def apply(path: Path) -> None:
        content = json.loads((path / file).read_text())
        change(content)
        (path / file).write_text(json.dumps(content))

    return apply


def put(file: str, *keys: str, value: Any) -> Damage:
    """Set one value deep in a JSON file."""

    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return json_file(file, change)


def take(file: str, *keys: str) -> Damage:
    """Remove one key deep in a JSON file."""

    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return json_file(file, change)


def remove(file: str) -> Damage:
    """Remove a file."""
    return lambda path: (path / file).unlink()


def overwrite(file: str, text: str) -> Damage:
    """Give a file other content."""

    def apply(path: Path) -> None:
        (path / file).write_text(text)

    return apply


def truncate(file: str, lost: int) -> Damage:
    """Cut bytes off the end of a file."""
    return lambda path: (path / file).write_bytes((path / file).read_bytes()[:-lost]) and None
