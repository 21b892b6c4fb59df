"""Read and validate the header of a safetensors file. Never maps or reads the tensor data.

The format: 8 bytes little-endian header length, that many bytes of JSON, then the tensors without gaps.
Nothing is allocated on the word of the file before its size has confirmed it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quantkit.checkpoint.sizes import ITEM_BYTES, itemsize
from quantkit.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the safetensors library refuses more
MAX_DIMENSIONS = 64
LFS_MAGIC = b"version https://git-lfs"
FETCH_AGAIN = "download the file again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        dtype: safetensors name, such as "BF16".
        file: name of the file inside the checkpoint directory.
        start: first byte in that file, header included.
        end: one past the last byte.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """What a valid safetensors file says about itself.

    Attributes:
        tensors: in the order of their data.
        metadata: the free strings under `__metadata__`.
        size: bytes of the whole file.
        sha256: hex digest of the header's JSON, padding included.
    """

    file: str
    tensors: tuple[TensorInfo, ...]
    metadata: dict[str, str]
    size: int
    sha256: str


def read_header(path: Path, file: str | None = None) -> Header:
    """Read and validate the header of a safetensors file.

    Args:
        path: the file, or a symlink to it.
        file: the name that errors and `TensorInfo.file` carry; the file's own name when None.

    Raises:
        CheckpointError: the file cannot be read, is no safetensors file, is cut short or contradicts itself.
    """
    file = path.name if file is None else file
    if not os.path.isfile(path):  # not pathlib: it raises for a name that is too long
        raise CheckpointError(f"`{file}` is {_absence(path)}", FETCH_AGAIN)
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            raw = _header_bytes(stream, size, file)
    except OSError as error:
        raise CheckpointError(f"`{file}` cannot be read: {error.strerror}", "check its permissions") from error
    entries = parse_json_object(raw, file)
    metadata = _metadata(entries.pop("__metadata__", {}), file)
    data_start = 8 + len(raw)
    tensors = [_tensor(name, entry, data_start, file) for name, entry in entries.items()]
    tensors.sort(key=lambda info: (info.start, info.end))
    _require_cover(tensors, data_start, size, file)
    return Header(file, tuple(tensors), metadata, size, hashlib.sha256(raw).hexdigest())


def parse_json_object(raw: bytes, file: str) -> dict[str, Any]:
    """Parse bytes that must hold one JSON object without duplicate keys.

    Raises:
        CheckpointError: naming `file`.
    """
    refuse_lfs_pointer(raw, file)
    try:
        # RecursionError: brackets nested some thousand deep
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"`{file}` does not hold valid JSON: {error}", FETCH_AGAIN) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"`{file}` holds a JSON {type(value).__name__}, not an object", FETCH_AGAIN)
    return value


def refuse_lfs_pointer(raw: bytes, file: str) -> None:
    """Raise CheckpointError when the first bytes of a file are those of a Git LFS pointer."""
    if raw.startswith(LFS_MAGIC):
        raise CheckpointError(f"`{file}` is a Git LFS pointer, not the file itself", "run `git lfs pull` there")


def _absence(path: Path) -> str:
    if path.is_symlink() and not path.exists():
        return f"a symlink to a missing file, {os.readlink(path)}"
    return "not a regular file" if path.exists() else "missing"


def _header_bytes(stream: BinaryIO, size: int, file: str) -> bytes:
    """Return the JSON part, having checked its length against the size of the file."""
    start = stream.read(len(LFS_MAGIC))
    refuse_lfs_pointer(start, file)
    if size < 8:
        raise CheckpointError(f"`{file}` has {size} bytes, too few for a safetensors file", FETCH_AGAIN)
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"`{file}` is not a safetensors file: its first 8 bytes claim a header of {length:,} bytes", FETCH_AGAIN
        )
    if 8 + length > size:
        missing = 8 + length - size
        raise CheckpointError(f"`{file}` ends inside its header: {missing:,} bytes are missing", FETCH_AGAIN)
    stream.seek(8)
    raw = stream.read(length)
    if not raw.startswith(b"{"):
        raise CheckpointError(f"`{file}` is not a safetensors file: its header does not start with `{{`", FETCH_AGAIN)
    return raw


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!a} occurs twice")
    return unique


def _metadata(value: object, file: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise CheckpointError(f"`{file}` has a `__metadata__` that is not a map of strings", FETCH_AGAIN)
    return value


def _tensor(name: str, entry: object, data_start: int, file: str) -> TensorInfo:
    """Validate one entry by itself: dtype, shape, and a byte range of the size that these two give."""
    if not name.isprintable():
        raise CheckpointError(f"`{file}` has a tensor name with unprintable characters: {name!a}", FETCH_AGAIN)
    where = f"`{name}` in `{file}`"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} has no dtype, shape and data_offsets", FETCH_AGAIN)
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(
            f"{where} has dtype {dtype!a}, which quantkit cannot read", "use a BF16 or F16 checkpoint"
        )
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(f"{where} has a shape that is none: {_short(shape)}", FETCH_AGAIN)
    if math.prod(max(size, 1) for size in shape) * itemsize(dtype) >= 2**63:
        raise CheckpointError(f"{where} has a shape that no machine can hold: {_short(shape)}", FETCH_AGAIN)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has data_offsets that are none: {_short(offsets)}", FETCH_AGAIN)
    begin, end = offsets
    nbytes = math.prod(shape) * itemsize(dtype)
    if end - begin != nbytes:
        raise CheckpointError(f"{where} has {end - begin:,} bytes, but {dtype} {shape} takes {nbytes:,}", FETCH_AGAIN)
    return TensorInfo(name, dtype, tuple(shape), file, data_start + begin, data_start + end)


def _are_sizes(value: Any) -> bool:
    # bool is an int in Python; JSON true is no size
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _require_cover(tensors: list[TensorInfo], data_start: int, size: int, file: str) -> None:
    """Raise CheckpointError unless the tensors, sorted by position, cover the data exactly once."""
    at = data_start
    for info in tensors:
        if info.start != at:
            fault = "overlaps the tensor before it" if info.start < at else "has unused bytes before it"
            raise CheckpointError(f"`{info.name}` in `{file}` {fault}, at byte {info.start:,}", FETCH_AGAIN)
        at = info.end
    if at > size:
        first = next(info.name for info in tensors if info.end > size)
        raise CheckpointError(f"`{file}` is truncated: {at - size:,} bytes are missing, from `{first}` on", FETCH_AGAIN)
    if at < size:
        raise CheckpointError(f"`{file}` has {size - at:,} bytes after its last tensor", FETCH_AGAIN)
