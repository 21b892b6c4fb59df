"""Several models over the same tokens, block by block: one decoder block of one model in memory at a time.

D hidden, T tokens of a window, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quantkit.blocks.block import Block
from quantkit.blocks.skeleton import Skeleton, build_skeleton
from quantkit.blocks.stream import Stream
from quantkit.checkpoint.hub import resolve_model
from quantkit.device import current_rss
from quantkit.errors import NumericalError, UsageError
from quantkit.eval.divergence import TokenScores, log_probabilities, score
from quantkit.eval.windows import Windows
from quantkit.events import BlockDone, Emit, Note, Stage
from quantkit.weights import WeightSource

# logits of one model held at once: elements, each in float32, float64 and a few products
LOGITS = 1 << 22
SIXTEEN = {"F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint or artifact that takes part."""

    name: str
    source: WeightSource
    skeleton: Skeleton

    @classmethod
    def open(cls, name: str, *, device: torch.device, trust_remote_code: bool, emit: Emit) -> Model:
        """Read its headers and build it without weights."""
        source = WeightSource.open(resolve_model(name, emit=emit))
        path = source.checkpoint.path
        return cls(
            name, source, build_skeleton(path, source.tensors, device=device, trust_remote_code=trust_remote_code)
        )

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.source.checkpoint.path

    @property
    def sixteen(self) -> torch.dtype:
        """The 16-bit dtype that it is stored in; bfloat16 for a model in float32."""
        return SIXTEEN.get(self.source.dtype or "", torch.bfloat16)

    def read(
        self,
        names: Mapping[str, str],
        dtype: torch.dtype,
        device: torch.device,
        like: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Read {parameter: tensor name}.

        Args:
            like: tensors in memory, which are taken where they hold the same values.
        """
        found: dict[str, Tensor] = {}
        for name, stored in names.items():
            tensor = self.source.read([stored], dtype)[stored].to(device)
            other = (like or {}).get(name)
            found[name] = other if other is not None and torch.equal(other, tensor) else tensor
        return found


@dataclass(slots=True)
class Pass:
    """One forward pass over the text.

    Attributes:
        dtype: of its arithmetic.
        rows: how many of the text's windows, from the first, it takes.
        optional: it ends where its numbers are not finite, and the others go on.
        ended: it did.
    """

    model: Model
    dtype: torch.dtype
    rows: int
    optional: bool = False
    ended: bool = False
    stream: Stream = field(init=False)

    def begin(self, text: Windows, outer: Mapping[str, Tensor]) -> None:
        """Embed the text."""
        self.stream = Stream.embed(self.model.skeleton, cast(outer, self.dtype), text.rows[: self.rows])

    def advance(self, block: Block, weights: Mapping[str, Tensor], emit: Emit) -> None:
        """Go behind a block; raises NumericalError where the output is not finite, unless this pass is optional."""
        if self.ended:
            return
        try:
            self.stream.advance(block, cast(weights, self.dtype))
        except NumericalError:
            if not self.optional:
                raise
            self.end(emit)

    def end(self, emit: Emit) -> None:
        """Leave the text."""
        self.ended = True
        name = str(self.dtype).removeprefix("torch.")
        emit(Note(f"`{self.model.name}` leaves the range of {name}: there is no 16-bit noise floor"))

    def hidden(self) -> dict[int, Tensor]:
        """{window: hidden states [T, D] on the host}, views of the stream's own."""
        return {row: batch.hidden[j] for batch in self.stream.batches for j, row in enumerate(batch.rows)}


def run_together(
    reference: Model,
    others: Sequence[Model],
    text: Windows,
    *,
    floor_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    emit: Emit,
) -> tuple[list[TokenScores], TokenScores | None]:
    """Compare models with a reference, and the reference in its 16-bit dtype with itself.

    Args:
        floor_rows: windows, from the first, for the 16-bit pass; none with 0.
        dtype: of all other passes.

    Returns:
        The scores of every other model; and those of the 16-bit pass, None where there is none.

    Raises:
        NumericalError: a model's states or logits are not finite.
        UsageError: the models have different vocabularies.
    """
    for model in others:
        if model.skeleton.vocabulary != reference.skeleton.vocabulary:
            raise UsageError(
                f"`{model.name}` knows {model.skeleton.vocabulary:,} tokens, and `{reference.name}`"
                f" {reference.skeleton.vocabulary:,}: their distributions cannot be compared",
                "compare a model with what it was made of",
            )
    passes = [Pass(model, dtype, len(text.rows)) for model in (reference, *others)]
    floor = [Pass(reference, reference.sixteen, floor_rows, optional=True)] if floor_rows else []
    _advance([*passes, *floor], text, dtype, device, emit)
    found = _scores([*passes, *floor], text, device, emit)
    return found[: len(others)], found[-1] if floor and not floor[0].ended else None


def cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors, floating-point ones in another dtype."""
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _advance(passes: list[Pass], text: Windows, dtype: torch.dtype, device: torch.device, emit: Emit) -> None:
    """Bring all passes behind their last block; the weights of each model are read once."""
    models = list({id(each.model): each.model for each in passes}.values())
    mine = {id(model): [each for each in passes if each.model is model] for model in models}
    for model in models:
        outer = model.read(model.skeleton.embedding(), dtype, device)
        for each in mine[id(model)]:
            each.begin(text, outer)
        del outer
    count = max(len(model.skeleton.blocks) for model in models)
    for index in range(count):
        begun = time.monotonic()
        emit(Stage(index, count, "forward"))
        for model in models:
            for block in model.skeleton.blocks[index : index + 1]:
                read = model.source.read_for(block.module, block.tensors, dtype)
                weights = {name: weight.to(device) for name, weight in read.items()}
                del read
                for each in mine[id(model)]:
                    each.advance(block, weights, emit)
                del weights
        emit(BlockDone(index, count, {}, time.monotonic() - begun, current_rss()))


def _scores(passes: list[Pass], text: Windows, device: torch.device, emit: Emit) -> list[TokenScores]:
    """Compare the logits of every pass after the first with those of the first, a few tokens at a time."""
    outer: list[dict[str, Tensor]] = []
    for each in passes:
        # what no artifact packs is the same in all of them
        known = outer[0] if outer and each.dtype == passes[0].dtype else None
        outer.append(each.model.read(each.model.skeleton.outer, each.dtype, device, known))
    states = [each.hidden() for each in passes]
    found: list[list[TokenScores]] = [[] for _ in passes]
    step = max(1, LOGITS // passes[0].model.skeleton.vocabulary)
    for row in range(len(text.rows)):
        for start, stop, targets in _pieces(text, row, step):
            own: Tensor | None = None
            for k, each in enumerate(passes):
                if each.ended or row >= each.rows:
                    continue
                other = _log_probabilities(each, outer[k], states[k][row][start:stop].to(device), emit)
                own = other if own is None else own
                if k and own is not None and other is not None:
                    found[k].append(score(own, other, targets.to(device)))
    return [TokenScores.joined(parts) for parts in found[1:] if parts]


def _log_probabilities(each: Pass, outer: Mapping[str, Tensor], hidden: Tensor, emit: Emit) -> Tensor | None:
    """Log-probabilities, float64 [T, V], of hidden states [T, D]; None where an optional pass ends here."""
    logits = each.model.skeleton.logits(outer, hidden[None])[0].float()
    if bool(logits.sum().isfinite()):  # as all of them are, at a tenth of the cost
        return log_probabilities(logits)
    if each.optional:
        each.end(emit)
        return None
    raise NumericalError(
        f"the logits of `{each.model.name}` are not finite", "look at the weights of the final norm and the head"
    )


def _pieces(text: Windows, row: int, step: int) -> Iterator[tuple[int, int, Tensor]]:
    """(first state, state after the last, tokens that they predict) of the scored part of a window."""
    ids = text.rows[row]
    last = len(ids) - 1
    for start in range(last - text.scored[row], last, step):
        stop = min(start + step, last)
        yield start, stop, ids[start + 1 : stop + 1]
