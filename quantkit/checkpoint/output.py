"""The directory a run writes: it appears complete, or not at all, and what is worth it is kept for another try.

Everything goes to `.NAME.partial` beside it, which one process at a time may hold. What was finished is renamed onto
the output as the last step; what it replaces waits in `.NAME.replaced` until then.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from quantkit.checkpoint.layout import TensorSpec
from quantkit.checkpoint.outdir import (
    explain,
    lock,
    make_parents,
    put_back,
    require_space,
    require_writable_target,
    sync_directory,
    sync_tree,
)
from quantkit.checkpoint.writer import ArtifactWriter
from quantkit.errors import Interrupted, QuantkitError, ResourceError, UsageError

# what failed for another reason of our own fails again in the same way
_CURABLE = (UsageError, ResourceError, Interrupted)


class OutputDirectory:
    """Context manager for the place of an output, of one artifact or of several in folders.

    Leaving it without a commit leaves `out` as it was, and removes everything else, unless `keep` is set and the same
    command may succeed when it is repeated.

    Args:
        overwrite: replace a model that is in `out`. It stays until the new one is complete.
        source: a checkpoint directory that must not be touched.

    Attributes:
        work: `.NAME.partial`, held by this process.
        content: the folder in it that becomes `out`.
        keep: what is there is worth another try.
    """

    def __init__(self, out: Path, *, overwrite: bool = False, source: Path | None = None) -> None:
        self.out = Path(out)
        self.keep = False
        self._overwrite = overwrite
        self._source = source
        self._parents: list[Path] = []
        self._lock: int | None = None
        self._taken = False

    def __enter__(self) -> Self:
        """Check the place and take it.

        Raises:
            UsageError: `out` may not be written, or another process writes it.
            ResourceError: permissions or limits do not allow it.
        """
        target = self._require_writable()
        self._target = target
        self._aside = target.with_name(f".{target.name}.replaced")
        self.work = target.with_name(f".{target.name}.partial")
        self.content = self.work / "content"
        require_space(target.parent, 0)
        try:
            with explain(target):
                make_parents(target.parent, self._parents)
                self._take()
                self._settle()
                self._require_writable()  # again: a directory may be back in its place
                if not self.content.exists():  # what an earlier run finished is in its place
                    self.clear()
        except BaseException:
            self._leave(keep=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        curable = kind is not None and (not issubclass(kind, QuantkitError) or issubclass(kind, _CURABLE))
        try:
            self._settle()
        finally:
            self._leave(keep=self.keep and curable)

    def clear(self) -> None:
        """Remove what an earlier run left to go on from."""
        with explain(self.out):
            for path in self.work.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            self.content.mkdir()

    def writer(self, specs: Iterable[TensorSpec], max_shard_bytes: int, folder: Path | str = "") -> ArtifactWriter:
        """Open a writer for the artifact, or for the one in `folder`; arguments and errors are the writer's."""
        return ArtifactWriter(self.content / folder, specs, max_shard_bytes=max_shard_bytes, place=self.out)

    def commit(self) -> Path:
        """Force everything to disk and rename it onto `out`, which is returned.

        Raises:
            UsageError: somebody else filled `out` meanwhile.
            ResourceError: the disk refuses; `out` is as it was.
        """
        with explain(self.out):
            sync_tree(self.content)
            if self._target.is_dir() and any(self._target.iterdir()):
                if not self._overwrite:
                    raise UsageError(f"`{self.out}` was filled by somebody else meanwhile", "choose another directory")
                self._target.rename(self._aside)
            self.content.rename(self._target)
            sync_directory(self._target.parent)
        return self.out

    def _require_writable(self) -> Path:
        return require_writable_target(self.out, overwrite=self._overwrite, source=self._source)

    def _take(self) -> None:
        """Create and lock the working directory, which another process that ends now may remove."""
        while True:
            self.work.mkdir(exist_ok=True)
            try:
                self._lock = lock(self.work)
                self._taken = self._lock is None or os.path.samestat(os.fstat(self._lock), os.stat(self.work))
            except FileNotFoundError:
                continue
            except BlockingIOError:
                raise UsageError(
                    f"another run is writing `{self.out}`", "wait for it, or choose another directory"
                ) from None
            if self._taken:
                return

    def _settle(self) -> None:
        """End a replacement that was cut short: the old directory comes back, or goes when the new one is there."""
        if not self._aside.exists():
            return
        if self._target.exists():
            shutil.rmtree(self._aside, ignore_errors=True)
        else:
            put_back(self._aside, self._target)

    def _leave(self, *, keep: bool) -> None:
        """Give the working directory up, and remove it unless there is something in it to keep."""
        if self._taken:
            with suppress(OSError):  # not empty
                self.work.rmdir() if keep else shutil.rmtree(self.work)
        if self._lock is not None:
            os.close(self._lock)
        for parent in reversed(self._parents):
            with suppress(OSError):  # not empty: it holds the artifact, or something of somebody else
                parent.rmdir()
        self._lock, self._taken = None, False
        self._parents.clear()
