"""Linears that read one tensor, and where a rescale of that tensor may be folded. Values only; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class FoldKind(StrEnum):
    """How a producer absorbs 1/s."""

    NORM = "norm"  # y = weight * normalized (+ bias): weight / s, bias / s
    NORM_PLUS_ONE = "norm (1 + weight)"  # y = (1 + weight) * normalized: (1 + weight) / s - 1
    LINEAR = "linear"  # rows of a weight [N, K] (and of its bias) / s


@dataclass(frozen=True, slots=True)
class Fold:
    """A producer whose output may be divided by s while its consumers' input columns are multiplied by s.

    Attributes:
        producer: module name, relative to its block.
        kind: how the producer absorbs 1/s.
        start: first row of a linear producer that is scaled (fused projections use only a part); 0 for norms.
        channels: length of s.
        head_dim: channels per head when s is shared between heads, else `channels`.
        repeat: consumer heads that read one producer head (grouped-query attention), else 1.
        evidence: relative change of the block's output when the fold was tried with random s, float32.
    """

    producer: str
    kind: FoldKind
    start: int
    channels: int
    head_dim: int
    repeat: int = 1
    evidence: float = 0.0

    def expand(self, s: Tensor) -> Tensor:
        """s per input channel of the consumers [K], from s per channel of the producer [channels]."""
        return s.view(-1, self.head_dim).repeat_interleave(self.repeat, 0).reshape(-1)


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Linears that read the same tensor.

    Attributes:
        names: module names relative to the block, in the order they run.
        in_features: width of the shared input.
        scope: smallest submodule that holds all of them ("" is the block itself).
        mixes_tokens: the scope's output at one token depends on its input at another (attention).
        fold: where a rescale can go, proved; or None.
    """

    names: tuple[str, ...]
    in_features: int
    scope: str = ""
    mixes_tokens: bool = False
    fold: Fold | None = None


@dataclass(frozen=True, slots=True)
class RejectedFold:
    """A fold that was tried and changed the block's output."""

    producer: str
    names: tuple[str, ...]
    evidence: float
