"""Hidden states at one block boundary, for all calibration or evaluation rows.

S rows, B rows of a batch, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.blocks.block import Block, Call, Weights
from quantkit.blocks.kvcache import CacheTap, run_tapped
from quantkit.blocks.skeleton import Skeleton
from quantkit.errors import CheckpointError, NumericalError, UsageError

# tokens that go through a block at once; bounds the activations inside it
BATCH_TOKENS = 2048


@dataclass(slots=True)
class Batch:
    """Rows of one length.

    Attributes:
        rows: their positions among all rows.
        hidden: [B, T, D] on the host, in the dtype of the forward passes.
        calls: how the model calls each block for them.
        reference: [B, T, D], the same rows in the full-precision model; None where nobody asks for it.
    """

    rows: tuple[int, ...]
    hidden: Tensor
    calls: list[Call]
    reference: Tensor | None = None


@dataclass(slots=True)
class Stream:
    """The batches in front of one block. Rows are never padded, so no padding can reach a statistic.

    Attributes:
        device: where blocks run; hidden states wait on the host, since all of them need not fit beside a block.
    """

    batches: list[Batch]
    device: torch.device

    @classmethod
    def embed(
        cls, skeleton: Skeleton, outer: Mapping[str, Tensor], rows: Sequence[Tensor], *, reference: bool = False
    ) -> Stream:
        """Embed token rows, int64 [T_i] each, and record how the model calls each block for them.

        Args:
            outer: {parameter name: tensor} of everything outside the blocks, in the dtype and on the device of the run.
            reference: keep the full-precision hidden states beside the quantized ones.

        Raises:
            CheckpointError: a token has no row in the embedding.
            UsageError: a row is longer than the model's table of positions.
        """
        _require_room(skeleton, rows)
        device = next(iter(outer.values())).device
        batches = []
        for members in _batches_of(rows):
            ids = torch.stack([rows[i] for i in members]).to(device)
            hidden, calls = skeleton.record(outer, ids)
            hidden = hidden.cpu()
            batches.append(Batch(members, hidden, calls, hidden if reference else None))
        return cls(batches, device)

    def inputs(self, block: Block) -> Iterator[tuple[Tensor, Call]]:
        """(hidden states, call) of every batch, as `block` takes them, on the device."""
        for batch in self.batches:
            yield batch.hidden.to(self.device), batch.calls[block.index]

    @torch.no_grad()
    def advance(self, block: Block, weights: Weights, tap: CacheTap | None = None) -> None:
        """Replace the hidden states by those behind `block`.

        Args:
            tap: gets what its attention hands to a KV cache, and says what attention sees.

        Raises:
            NumericalError: they are not finite; names the block.
        """
        for batch, (hidden, call) in zip(self.batches, self.inputs(block), strict=True):
            output = run_tapped(block, weights, hidden, call, tap) if tap else block(weights, hidden, call)
            if not bool(torch.isfinite(output).all()):
                raise NumericalError(
                    f"the output of `{block.path}` is not finite",
                    "run the forward passes with `--dtype float32`; if that does not help, look at the source weights",
                )
            batch.hidden = output.cpu()

    @torch.no_grad()
    def advance_reference(self, block: Block, weights: Weights) -> None:
        """Replace the full-precision hidden states by those behind `block`, run with its own weights."""
        for batch in self.batches:
            assert batch.reference is not None
            batch.reference = block(weights, batch.reference.to(self.device), batch.calls[block.index]).cpu()

    @property
    def nbytes(self) -> int:
        """Bytes of all hidden states."""
        kept = (t for batch in self.batches for t in (batch.hidden, batch.reference) if t is not None)
        return sum(tensor.nbytes for tensor in kept)

    def states(self) -> Iterator[dict[str, Tensor]]:
        """The hidden states of every batch, {hidden, and reference where there is one}."""
        for batch in self.batches:
            yield {"hidden": batch.hidden} | ({} if batch.reference is None else {"reference": batch.reference})

    def restore(self, states: Iterable[Mapping[str, Tensor]]) -> None:
        """Take over what `states` gave of a stream of the same rows."""
        for batch, each in zip(self.batches, states, strict=True):
            batch.hidden, batch.reference = each["hidden"], each.get("reference")

    def ordered(self) -> Iterable[tuple[int, Tensor]]:
        """(row number, hidden states [T, D]) of every row."""
        for batch in self.batches:
            yield from zip(batch.rows, batch.hidden.to(self.device), strict=True)


def _require_room(skeleton: Skeleton, rows: Sequence[Tensor]) -> None:
    highest, longest = max(int(row.max()) for row in rows), max(len(row) for row in rows)
    if highest >= skeleton.vocabulary:
        raise CheckpointError(
            f"the text has token {highest}, and the model's embedding has {skeleton.vocabulary} rows",
            "the tokenizer may belong to another model",
        )
    if (limit := skeleton.positions) is not None and longest > limit:
        raise UsageError(
            f"rows of {longest:,} tokens are too long for the model, which has {limit:,} positions",
            f"use `--seq-len {limit}`, or `--window {limit}` for an evaluation",
        )


def _batches_of(rows: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Row numbers in batches of equal length, each of at most BATCH_TOKENS tokens or one row."""
    by_length: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        by_length.setdefault(len(row), []).append(i)
    batches = []
    for length, members in by_length.items():
        size = max(1, BATCH_TOKENS // length)
        batches += [tuple(members[k : k + size]) for k in range(0, len(members), size)]
    return batches
