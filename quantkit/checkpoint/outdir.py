"""Where an artifact may go, and the file system calls that put it there. Every refusal is in plain words."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quantkit.errors import ResourceError, UsageError

try:
    import fcntl
except ImportError:  # Windows: abandoned directories are then left to the user
    fcntl = None  # type: ignore[assignment]

SPACE_MARGIN = 64 * 2**20  # bytes for config, index, tokenizer and the file system's own bookkeeping
_REASONS = {
    errno.ENOSPC: ("the disk is full", "free space or choose a directory on another disk"),
    errno.EDQUOT: ("your disk quota is used up", "free space or choose a directory on another disk"),
    errno.EFBIG: ("a file would exceed the file size limit", "raise `ulimit -f`, or choose a smaller shard size"),
    errno.EACCES: ("permission denied", "choose a directory you may write"),
    errno.EPERM: ("permission denied", "choose a directory you may write"),
    errno.EROFS: ("the file system is read-only", "choose a directory you may write"),
}


@contextmanager
def explain(out: Path) -> Iterator[None]:
    """Turn an OSError into a ResourceError that names `out`."""
    try:
        yield
    except OSError as error:
        reason, hint = _REASONS.get(error.errno or 0, (error.strerror or str(error), "check the disk"))
        raise ResourceError(f"`{out}` cannot be written: {reason}", hint) from error


def require_writable_target(out: Path, *, overwrite: bool, source: Path | None) -> Path:
    """Return `out` with symlinks resolved when an artifact may go there.

    Raises:
        UsageError: it is a file, is not empty, or shares its place with the source.
        ResourceError: it cannot be looked at.
    """
    with explain(out):
        target = out.resolve()
        if source is not None:
            _refuse_overlap(out, target, source)
        if target.exists() and not target.is_dir():
            raise UsageError(f"`{out}` is a file, not a directory", "choose another output directory")
        # the directory is replaced by a rename, and the caller's shell would be left in the old one
        if target.exists() and Path.cwd().is_relative_to(target):
            raise UsageError(f"`{out}` is the directory you are in and cannot be replaced", "name a new directory")
        names = sorted(os.listdir(target)) if target.exists() else []
        if names and not overwrite:
            raise UsageError(f"`{out}` is not empty", "choose another directory, or pass `--overwrite` to replace it")
        # --overwrite replaces a model, or a folder of models, never a home directory or a project
        if names and not _is_model(target) and not all(_is_model(target / name) for name in names):
            raise UsageError(
                f"`{out}` holds no model but other files, such as `{names[0]}`, and is not overwritten",
                "choose another directory, or remove it yourself",
            )
    return target


def _is_model(path: Path) -> bool:
    return (path / "config.json").is_file() or any(path.glob("*.safetensors"))


def _refuse_overlap(out: Path, target: Path, source: Path) -> None:
    origin = source.resolve()
    if target == origin:
        raise UsageError(f"`{out}` is the source checkpoint itself", "choose another output directory")
    if target.is_relative_to(origin):
        raise UsageError(f"`{out}` lies inside the source checkpoint `{source}`", "choose another output directory")
    if origin.is_relative_to(target):
        raise UsageError(f"`{out}` contains the source checkpoint `{source}`", "choose another output directory")


def require_space(parent: Path, total_bytes: int) -> None:
    """Raise ResourceError, with the numbers, unless the disk has room for `total_bytes` and a margin."""
    with explain(parent):
        existing = next(path for path in (parent, *parent.parents) if path.exists())
        if not existing.is_dir():
            raise UsageError(f"`{existing}` is a file, not a directory", "choose another output directory")
        free = shutil.disk_usage(existing).free
    if free < total_bytes + SPACE_MARGIN:
        raise ResourceError(
            f"the artifact needs {_size(total_bytes + SPACE_MARGIN)}, but `{existing}` has {_size(free)} free",
            "free space or choose a directory on another disk",
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def make_parents(parent: Path, made: list[Path]) -> None:
    """Create `parent` and what is missing above it, appending each new directory to `made`, outermost first."""
    missing = [path for path in (parent, *parent.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir()
        made.append(path)


def reserve(path: Path, header: bytes, size: int) -> None:
    """Create a file of `size` bytes that starts with `header`; a full disk shows here, not hours later."""
    with open(path, "xb", buffering=0) as stream:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(stream.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
        stream.truncate(size)
        rest = memoryview(header)
        while len(rest):
            rest = rest[stream.write(rest) :]


def sync_directory(path: Path) -> None:
    """Force the entries of a directory to disk, where the system can."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems refuse; the files themselves are synced
            os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(directory: Path) -> None:
    """Force every file below a directory, and their names, to disk."""
    for root, _, files in os.walk(directory):
        for file in files:
            with open(Path(root) / file, "r+b") as stream:
                os.fsync(stream.fileno())
        sync_directory(Path(root))


def replace_file(path: Path, data: bytes) -> None:
    """Give a file new content: after a crash it has the old or the new one, on disk."""
    beside = path.with_name(f"{path.name}.new")
    with open(beside, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(path)
    sync_directory(path.parent)


def lock(directory: Path) -> int | None:
    """Mark a directory as in use until the returned handle is closed or the process dies.

    Returns:
        None where the system has no such marks.

    Raises:
        BlockingIOError: a living process has marked it.
    """
    if fcntl is None:
        return None
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:  # some network file systems refuse
        os.close(handle)
        return None
    return handle


def put_back(aside: Path, target: Path) -> None:
    """Rename what was moved aside to its old name; raises ResourceError that says where it is."""
    try:
        aside.rename(target)
    except OSError as error:
        raise ResourceError(
            f"the old `{target}` could not be put back: {error.strerror}", f"it is in `{aside}`: move it yourself"
        ) from error
