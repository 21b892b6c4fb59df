"""Where a run stands, so that an interrupted one goes on after its last finished block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from quantkit.artifact import Artifact
from quantkit.blocks.stream import Stream
from quantkit.checkpoint.ledger import Ledger
from quantkit.checkpoint.outdir import require_space
from quantkit.checkpoint.output import OutputDirectory
from quantkit.errors import Interrupted, ResourceError
from quantkit.formats.scales import Moved
from quantkit.plan import Plan
from quantkit.record import RunRecord, versions


@dataclass(slots=True)
class Progress:
    """The progress of one run in its output directory.

    Attributes:
        done: finished blocks.
        blocks: of the model.
    """

    output: OutputDirectory
    ledger: Ledger
    blocks: int

    @classmethod
    def open(cls, output: OutputDirectory, plan: Plan, record: RunRecord, *, restart: bool = False) -> Progress:
        """Find what an interrupted run left in the output directory, and drop it if it is of no use.

        Args:
            restart: drop it in any case.

        Raises:
            UsageError: that run would have written another output; says in what they differ.
        """
        if restart:
            output.clear()
        output.keep = True  # also if it is refused
        ledger = Ledger.open(output.work, output.out, fingerprint(plan, record))
        if not ledger.done:
            output.clear()
        output.keep = bool(ledger.done)
        return cls(output, ledger, plan.blocks)

    @property
    def done(self) -> int:
        return self.ledger.done

    def restore(self, artifacts: Sequence[Artifact], record: RunRecord, stream: Stream) -> None:
        """Bring everything to where it was when the last block was finished.

        Args:
            stream: freshly embedded; the disk must have room for its hidden states.

        Raises:
            ResourceError: it has not.
        """
        # those of one block are written before those of the block before it are removed
        require_space(self.output.out.resolve().parent, stream.nbytes * (1 if self.done else 2))
        if not self.done:
            return
        state = self.ledger.state
        record.restore(state["record"])
        for artifact, each in zip(artifacts, state["artifacts"], strict=True):
            artifact.writer.resume(each["written"])
            artifact.moved = Moved(**each["moved"])
        stream.restore(self.ledger.tensors())

    def finished(self, block: int, artifacts: Sequence[Artifact], record: RunRecord, stream: Stream) -> None:
        """Note that a block is done, after all that was written of it is on disk."""
        for artifact in artifacts:
            artifact.writer.sync()
        written = [{"written": each.writer.written, "moved": asdict(each.moved)} for each in artifacts]
        self.ledger.finished(block + 1, {"record": record.state(), "artifacts": written}, stream.states())
        self.output.keep = True

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say of an interruption that the run can go on, and where."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.done:
                raise
            raise Interrupted("interrupted", self._goes_on("repeat the same command; it")) from None
        except ResourceError as error:
            if self.done:
                error.hint = f"{error.hint or 'repeat the same command'}; {self._goes_on('it')}"
            raise

    def _goes_on(self, subject: str) -> str:
        return f"{subject} goes on after block {self.done} of {self.blocks}"


def fingerprint(plan: Plan, record: RunRecord) -> dict[str, Any]:
    """Everything that decides the bytes of the output, and cheap signs of a source that was changed in place."""
    source = plan.source
    changed = {f"change of {name}": (source.path / name).stat().st_mtime for name in source.files}
    return {
        "recipe": {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(plan.recipe).items()},
        "source": {"source": source.digest()} | changed,
        "calibration tokens": record.calibration["tokens_digest"],
        "machine": {"device": record.device, "dtype": record.dtype},
        "versions": versions(),
    }
