"""Lay tensors out in safetensors shards before the first of them exists. Pure; touches no file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass

from quantkit.checkpoint.header import MAX_DIMENSIONS, MAX_HEADER_BYTES, TensorInfo
from quantkit.checkpoint.locate import SINGLE_FILE
from quantkit.checkpoint.sizes import ITEM_BYTES, itemsize
from quantkit.errors import CheckpointError, UsageError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that will be written.

    Attributes:
        dtype: safetensors name, such as "I32".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise CheckpointError(f"`{self.name}` cannot be written as {self.dtype!a}, which is no dtype")
        if len(self.shape) > MAX_DIMENSIONS or any(type(size) is not int or size < 0 for size in self.shape):
            raise CheckpointError(f"`{self.name}` cannot be written with shape {self.shape}, which is none")
        if not self.name.isprintable() or self.name == "__metadata__":
            raise CheckpointError(f"{self.name!a} cannot be the name of a tensor in a safetensors file")

    @property
    def nbytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One file of the artifact, down to the byte.

    Attributes:
        header: the first bytes of the file: length and padded JSON.
        tensors: in the order of their data, with absolute positions.
        size: bytes of the whole file.
    """

    file: str
    header: bytes
    tensors: tuple[TensorInfo, ...]
    size: int


def lay_out(specs: Iterable[TensorSpec], max_shard_bytes: int) -> tuple[ShardLayout, ...]:
    """Distribute tensors over shards, in the order given; the same input gives the same bytes.

    Args:
        max_shard_bytes: limit for the tensor data of one shard. A larger tensor gets a shard of its own.

    Raises:
        CheckpointError: no tensor, a name that occurs twice, or a header that no reader accepts.
        UsageError: the limit is not positive.
    """
    if max_shard_bytes < 1:
        raise UsageError(f"a shard of {max_shard_bytes} bytes holds nothing", "choose a larger shard size")
    shards = _fill_shards(specs, max_shard_bytes)
    if not shards:
        raise CheckpointError("there is no tensor to write", "check what the plan keeps and drops")
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    return tuple(
        _shard(file, shard) for file, shard in zip([SINGLE_FILE] if count == 1 else names, shards, strict=True)
    )


def _fill_shards(specs: Iterable[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = []
    seen: set[str] = set()
    used = 0
    for spec in specs:
        if spec.name in seen:
            raise CheckpointError(f"`{spec.name}` would be written twice", "check the renames of this model")
        seen.add(spec.name)
        if not shards or (used + spec.nbytes > limit and used > 0):
            shards.append([])
            used = 0
        shards[-1].append(spec)
        used += spec.nbytes
    return shards


def _shard(file: str, specs: Iterable[TensorSpec]) -> ShardLayout:
    # layout: wide dtypes first keeps every tensor aligned to its element, as the safetensors library does it
    ordered = sorted(specs, key=lambda spec: (-itemsize(spec.dtype), spec.name))
    # transformers refuses a file that does not say which framework wrote it
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    spans: list[tuple[TensorSpec, int, int]] = []
    at = 0
    for spec in ordered:
        spans.append((spec, at, at + spec.nbytes))
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(f"the header of `{file}` would take {len(text):,} bytes", "choose a smaller shard size")
    header = len(text).to_bytes(8, "little") + text
    infos = tuple(
        TensorInfo(spec.name, spec.dtype, spec.shape, file, len(header) + begin, len(header) + end)
        for spec, begin, end in spans
    )
    return ShardLayout(file, header, infos, len(header) + at)
