"""The files of a checkpoint that are neither config.json nor weights: they are copied byte for byte, never parsed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from quantkit.checkpoint.header import LFS_MAGIC, refuse_lfs_pointer
from quantkit.checkpoint.outdir import explain
from quantkit.checkpoint.writer import ArtifactWriter
from quantkit.errors import CheckpointError

_SKIPPED_DIRECTORIES = (".git", ".cache", "__pycache__", "original")
_WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".ot", ".tflite"),
    *(".onnx", ".onnx_data"),
)
_WEIGHT_INDEX = re.compile(r".+\.(safetensors|bin|pt|pth|h5|msgpack)\.index(\..+)?\.json")


def sidecar_files(path: Path) -> tuple[Path, ...]:
    """Return every file of a source directory that an artifact takes over as it is, sorted, as paths below `path`.

    Symlinks are followed, since a hub cache consists of them; each real directory is visited once.

    Raises:
        CheckpointError: a symlink to a missing file, a Git LFS pointer, or a file that cannot be read.
    """
    found: list[Path] = []
    visited: set[str] = set()
    for root, directories, names in os.walk(path, followlinks=True, onerror=_unreadable):
        real = os.path.realpath(root)
        if real in visited:
            directories.clear()
            continue
        visited.add(real)
        directories[:] = sorted(name for name in directories if not _is_skipped_directory(name))
        found += [Path(root) / name for name in names if not _is_weight(name)]
    config = path / "config.json"
    sidecars = sorted(file for file in found if file != config and (file.is_file() or file.is_symlink()))
    for file in sidecars:
        _require_content(file, str(file.relative_to(path)))
    return tuple(sidecars)


def copy_sidecars(src: Path, dst: ArtifactWriter | Path, skip: Collection[str] = ()) -> tuple[str, ...]:
    """Copy the sidecar files of `src` byte for byte and return their names, relative and with forward slashes.

    Args:
        dst: an open writer, or a directory.
        skip: names that are left out, because the caller writes its own.

    Raises:
        CheckpointError: as `sidecar_files`.
        UsageError: the writer has a file of that name already.
        ResourceError: the disk refuses.
    """
    files = {file.relative_to(src).as_posix(): file for file in sidecar_files(src)}
    chosen = {name: file for name, file in files.items() if name not in skip}
    for name, file in chosen.items():
        if isinstance(dst, ArtifactWriter):
            dst.copy_file(name, file)
        else:
            with explain(dst):
                (dst / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, dst / name)
    return tuple(chosen)


def _is_skipped_directory(name: str) -> bool:
    return name in _SKIPPED_DIRECTORIES or name.startswith("consolidated")


def _is_weight(name: str) -> bool:
    lower = name.lower()
    return lower.endswith(_WEIGHT_SUFFIXES) or lower.startswith("consolidated") or bool(_WEIGHT_INDEX.fullmatch(lower))


def _unreadable(error: OSError) -> None:
    raise CheckpointError(f"`{error.filename}` cannot be read: {error.strerror}", "check its permissions") from error


def _require_content(file: Path, name: str) -> None:
    if not file.is_file():
        raise CheckpointError(f"`{name}` is a symlink to a missing file", "download the file again")
    try:
        with open(file, "rb") as stream:
            start = stream.read(len(LFS_MAGIC))
    except OSError as error:
        raise CheckpointError(f"`{name}` cannot be read: {error.strerror}", "check its permissions") from error
    refuse_lfs_pointer(start, name)
