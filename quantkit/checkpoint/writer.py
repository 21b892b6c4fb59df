"""Write the files of an artifact.

The layout is known before the first weight, so each tensor goes straight to its place and no shard is buffered.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from quantkit.checkpoint.dtypes import DTYPE_NAMES
from quantkit.checkpoint.header import TensorInfo
from quantkit.checkpoint.layout import ShardLayout, TensorSpec, lay_out
from quantkit.checkpoint.locate import INDEX_FILE
from quantkit.checkpoint.outdir import explain, require_space, reserve
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, UsageError

__all__ = ["ArtifactWriter", "ShardLayout", "TensorSpec", "lay_out"]

_COPY_BYTES = 16 * 2**20


class ArtifactWriter:
    """Fills a directory with the shards of one artifact and the files beside them.

    Shards that an earlier writer of the same plan left there are taken over, with what was written to them; everything
    else in the directory is removed.

    Args:
        directory: created if it is not there.
        specs: every tensor of the artifact, in the order that fills the shards.
        max_shard_bytes: limit for the tensor data of one shard.
        place: where the user asked for the artifact; messages name it.

    Attributes:
        shards: the layout.
        total_bytes: size of all shards.

    Raises:
        ResourceError: disk space, permissions or limits do not allow it.
    """

    def __init__(self, directory: Path, specs: Iterable[TensorSpec], *, max_shard_bytes: int, place: Path) -> None:
        self.directory = directory
        self.shards = lay_out(specs, max_shard_bytes)
        self.total_bytes = sum(shard.size for shard in self.shards)
        self._place = place
        self._infos: dict[str, TensorInfo] = {info.name: info for shard in self.shards for info in shard.tensors}
        self._pending = dict.fromkeys(self._infos)  # a dict for its order
        self._unsynced: set[str] = set()
        self._digests: dict[str, str] = {}
        with explain(place):
            directory.mkdir(exist_ok=True)
            self._kept = {shard.file for shard in self.shards if _holds(directory / shard.file, shard)}
            for path in directory.iterdir():
                if path.name not in self._kept:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            fresh = [shard for shard in self.shards if shard.file not in self._kept]
            require_space(place.resolve().parent, sum(shard.size for shard in fresh))
            for shard in fresh:
                reserve(directory / shard.file, shard.header, shard.size)

    @property
    def written(self) -> list[str]:
        """Names of the tensors that are in their places."""
        return [name for name in self._infos if name not in self._pending]

    def resume(self, names: Iterable[str]) -> None:
        """Believe an earlier writer that it wrote these tensors.

        Raises:
            CheckpointError: a tensor that is not planned, or whose shard was not there.
        """
        for name in names:
            if name not in self._infos or self._infos[name].file not in self._kept:
                raise CheckpointError(f"`{name}` is not in what an interrupted run left for `{self._place}`")
            self._pending.pop(name, None)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors to their places.

        Raises:
            CheckpointError: a tensor that is not planned, was written before, or has another dtype or shape.
            ResourceError: the disk refuses.
        """
        for name, tensor in tensors.items():
            self._require_planned(name, DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in tensors.items():
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            self._write_at(self._infos[name], [flat.view(torch.uint8).numpy().data])

    def copy(self, ckpt: Checkpoint, names: Iterable[str]) -> None:
        """Copy tensors byte by byte from a checkpoint.

        Raises:
            CheckpointError: as for `write`, or the source cannot be read.
            ResourceError: the disk refuses.
        """
        names = list(names)
        for name in names:
            info = ckpt.info(name)
            self._require_planned(name, info.dtype, info.shape)
        for name in names:
            self._write_at(self._infos[name], ckpt.raw_chunks(name))

    def add_file(self, name: str, data: bytes | str) -> None:
        """Add a file next to the weights; text is written as UTF-8.

        Raises:
            UsageError: the name leads out of the directory, belongs to the weights or exists already.
            ResourceError: the disk refuses.
        """
        with self._new_file(name) as path, open(path, "xb") as stream:
            stream.write(data.encode() if isinstance(data, str) else data)

    def copy_file(self, name: str, source: Path) -> None:
        """Add a file next to the weights with the bytes of another.

        Raises:
            CheckpointError: the other file cannot be read.
            UsageError, ResourceError: as for `add_file`.
        """
        try:
            origin = open(source, "rb")  # noqa: SIM115  # so that its errors are not taken for those of the output
        except OSError as error:
            raise CheckpointError(f"`{source}` cannot be read: {error.strerror}", "check its permissions") from error
        with origin, self._new_file(name) as path, open(path, "xb") as stream:
            shutil.copyfileobj(origin, stream, _COPY_BYTES)

    def digests(self) -> dict[str, str]:
        """Return shard file -> sha256, from reading the files back. Needs every tensor to be written.

        Raises:
            CheckpointError: tensors are missing.
        """
        self._require_complete()
        if not self._digests:
            with explain(self._place):
                self._digests = {shard.file: _sha256(self.directory / shard.file) for shard in self.shards}
        return dict(self._digests)

    def sync(self) -> None:
        """Force what was written since the last call to disk."""
        with explain(self._place):
            for file in sorted(self._unsynced):
                with open(self.directory / file, "r+b") as stream:
                    os.fsync(stream.fileno())
        self._unsynced.clear()

    def seal(self) -> Path:
        """Write the index, and return the directory: complete, to be read before it is committed.

        Raises:
            CheckpointError: tensors are missing.
            ResourceError: the disk refuses.
        """
        self._require_complete()
        if len(self.shards) > 1:
            with explain(self._place):
                (self.directory / INDEX_FILE).write_bytes(_index(self.shards))
        return self.directory

    def _require_planned(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        info = self._infos.get(name)
        if info is None:
            raise CheckpointError(f"`{name}` is not in the plan of `{self._place}`")
        if name not in self._pending:
            raise CheckpointError(f"`{name}` was written already")
        if (dtype, shape) != (info.dtype, info.shape):
            raise CheckpointError(f"`{name}` is {dtype} {list(shape)}, but {info.dtype} {list(info.shape)} was planned")

    def _require_complete(self) -> None:
        if self._pending:
            names = list(self._pending)
            more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
            listed = ", ".join(f"`{name}`" for name in names[:3])
            raise CheckpointError(f"{len(names):,} of {len(self._infos):,} tensors were not written: {listed}{more}")

    def _write_at(self, info: TensorInfo, parts: Iterable[bytearray | memoryview]) -> None:
        with explain(self._place), open(self.directory / info.file, "r+b", buffering=0) as stream:
            stream.seek(info.start)
            for part in parts:
                rest = memoryview(part)
                while len(rest):
                    rest = rest[stream.write(rest) :]  # at most 2 GiB at a time on Linux
        del self._pending[info.name]
        self._unsynced.add(info.file)

    @contextmanager
    def _new_file(self, name: str) -> Iterator[Path]:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
            raise UsageError(f"`{name}` is no name of a file inside `{self._place}`")
        if name.endswith((".safetensors", ".safetensors.index.json")):
            raise UsageError(f"`{name}` is a name that belongs to the weights")
        target = self.directory / path
        with explain(self._place):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                yield target
            except FileExistsError:
                raise UsageError(f"`{name}` would be written twice into `{self._place}`") from None


def _holds(path: Path, shard: ShardLayout) -> bool:
    """Whether a file is this shard, as far as its header and size tell."""
    if not path.is_file() or path.stat().st_size != shard.size:
        return False
    with open(path, "rb") as stream:
        return stream.read(len(shard.header)) == shard.header


def _index(shards: Iterable[ShardLayout]) -> bytes:
    infos = sorted((info for shard in shards for info in shard.tensors), key=lambda info: info.name)
    content = {
        "metadata": {"total_size": sum(info.nbytes for info in infos)},
        "weight_map": {info.name: info.file for info in infos},
    }
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
