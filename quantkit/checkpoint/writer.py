"""Write an artifact directory: all of it or nothing.

Everything goes to a temporary sibling directory, which is renamed onto the output as the last step. The
layout is known before the first weight, so each tensor goes straight to its place and no shard is buffered.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from quantkit.checkpoint.dtypes import DTYPE_NAMES
from quantkit.checkpoint.header import TensorInfo
from quantkit.checkpoint.layout import ShardLayout, TensorSpec, lay_out
from quantkit.checkpoint.locate import INDEX_FILE
from quantkit.checkpoint.outdir import (
    explain,
    lock,
    make_parents,
    remove_abandoned,
    require_space,
    require_writable_target,
    reserve,
    sync_directory,
)
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError, ResourceError, UsageError

__all__ = ["ArtifactWriter", "ShardLayout", "TensorSpec", "lay_out"]

_COPY_BYTES = 16 * 2**20


class ArtifactWriter:
    """Context manager that fills a temporary directory and renames it onto `out` on commit.

    Leaving the context without a commit, for whatever reason, removes everything and leaves `out` as it was.

    Args:
        specs: every tensor of the artifact, in the order that fills the shards.
        max_shard_bytes: limit for the tensor data of one shard.
        overwrite: replace a model that is in `out`. It stays until the new one is complete.
        source: a checkpoint directory that must not be touched.

    Attributes:
        shards: the layout.
        total_bytes: size of all shards.
    """

    def __init__(
        self,
        out: Path,
        specs: Iterable[TensorSpec],
        *,
        max_shard_bytes: int,
        overwrite: bool = False,
        source: Path | None = None,
    ) -> None:
        self.out = Path(out)
        self.shards = lay_out(specs, max_shard_bytes)
        self.total_bytes = sum(shard.size for shard in self.shards)
        self._overwrite = overwrite
        self._source = source
        self._infos: dict[str, TensorInfo] = {info.name: info for shard in self.shards for info in shard.tensors}
        self._pending = dict.fromkeys(self._infos)  # a dict for its order
        self._digests: dict[str, str] = {}
        self._directory: Path | None = None
        self._aside: Path | None = None
        self._parents: list[Path] = []
        self._target = self.out
        self._lock: int | None = None
        self._committed = False

    def __enter__(self) -> Self:
        """Check the target, reserve the disk space, write the headers.

        Raises:
            UsageError: `out` is not a place that may be written.
            ResourceError: disk space, permissions or limits do not allow it.
        """
        target = require_writable_target(self.out, overwrite=self._overwrite, source=self._source)
        self._target = target
        remove_abandoned(target)
        require_space(target.parent, self.total_bytes)
        try:
            with explain(target):
                make_parents(target.parent, self._parents)
                directory = target.parent / f".{target.name}.partial-{secrets.token_hex(4)}"
                self._directory = directory
                directory.mkdir()
                self._lock = lock(directory)
                for shard in self.shards:
                    reserve(directory / shard.file, shard.header, shard.size)
        except BaseException:
            self._clean()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clean()

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
            directory = self._target if self._committed else self._open_directory()
            with explain(self.out):
                self._digests = {shard.file: _sha256(directory / shard.file) for shard in self.shards}
        return dict(self._digests)

    def seal(self) -> Path:
        """Write the index, and return the temporary directory: complete, to be read before the commit.

        Raises:
            CheckpointError: tensors are missing.
            ResourceError: the disk refuses.
        """
        directory = self._open_directory()
        self._require_complete()
        if len(self.shards) > 1:
            with explain(self.out):
                (directory / INDEX_FILE).write_bytes(_index(self.shards))
        return directory

    def commit(self) -> Path:
        """Force everything to disk and rename the directory onto `out`, which is returned.

        Raises:
            CheckpointError: tensors are missing.
            ResourceError: the disk refuses; `out` is as it was.
        """
        directory = self.seal()
        with explain(self.out):
            _sync_tree(directory)
            self._swap_in(directory)
            self._committed = True
            sync_directory(self._target.parent)
        return self.out

    def _swap_in(self, directory: Path) -> None:
        target = self._target
        if target.is_dir() and any(target.iterdir()):
            if not self._overwrite:
                raise UsageError(f"`{self.out}` was filled by somebody else meanwhile", "choose another directory")
            self._aside = target.parent / f".{target.name}.replaced-{secrets.token_hex(4)}"
            target.rename(self._aside)
        directory.rename(target)

    def _clean(self) -> None:
        """Bring back what was moved aside, or drop it when the new one is in place; remove what is temporary."""
        replaced = self._directory is None or not self._directory.exists()
        if self._aside is not None and self._aside.exists():
            if replaced:
                shutil.rmtree(self._aside, ignore_errors=True)
            else:
                _put_back(self._aside, self._target)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        for parent in reversed(self._parents):
            with suppress(OSError):  # not empty: it holds the artifact, or something of somebody else
                parent.rmdir()
        self._directory = self._aside = self._lock = None
        self._parents.clear()

    def _open_directory(self) -> Path:
        if self._directory is None or self._committed:
            raise RuntimeError("an ArtifactWriter writes between entering its context and its commit")
        return self._directory

    def _require_planned(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        info = self._infos.get(name)
        if info is None:
            raise CheckpointError(f"`{name}` is not in the plan of `{self.out}`")
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
        path = self._open_directory() / info.file
        with explain(self.out), open(path, "r+b", buffering=0) as stream:
            stream.seek(info.start)
            for part in parts:
                rest = memoryview(part)
                while len(rest):
                    rest = rest[stream.write(rest) :]  # at most 2 GiB at a time on Linux
        del self._pending[info.name]

    @contextmanager
    def _new_file(self, name: str) -> Iterator[Path]:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
            raise UsageError(f"`{name}` is no name of a file inside `{self.out}`")
        if name.endswith((".safetensors", ".safetensors.index.json")):
            raise UsageError(f"`{name}` is a name that belongs to the weights")
        target = self._open_directory() / path
        with explain(self.out):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                yield target
            except FileExistsError:
                raise UsageError(f"`{name}` would be written twice into `{self.out}`") from None


def _put_back(aside: Path, target: Path) -> None:
    try:
        aside.rename(target)
    except OSError as error:
        raise ResourceError(
            f"the old `{target}` could not be put back: {error.strerror}", f"it is in `{aside}`: move it yourself"
        ) from error


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


def _sync_tree(directory: Path) -> None:
    for root, _, files in os.walk(directory):
        for file in files:
            with open(Path(root) / file, "r+b") as stream:
                os.fsync(stream.fileno())
        sync_directory(Path(root))
