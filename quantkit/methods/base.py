"""What a method is: three verbs over tensors. A method never sees a model, a file or an architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from quantkit.ops.stats import InputStats
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import Scheme

if TYPE_CHECKING:
    from quantkit.group import LinearGroup

# {name: weight as it would be after quantization} -> error of the scope's output
Loss = Callable[[Mapping[str, Tensor]], float]


@dataclass(frozen=True, slots=True)
class Rounding:
    """How one group of sibling linears was rounded.

    Attributes:
        weights: {name: QuantizedWeight}.
        damp: damping that the factorization needed, as a fraction of mean(diag H); None when nothing was factored.
        fallback: what was done in another way than the method wants, and why, or "".
    """

    weights: dict[str, QuantizedWeight]
    damp: float | None = None
    fallback: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """One batch of calibration rows in front of a block.

    Attributes:
        run: {linear: weight [N, K]} -> the block's output [B, T, D] with these weights; differentiable in them.
        target: [B, T, D], the block's output in the full-precision model.
    """

    run: Callable[[Mapping[str, Tensor]], Tensor]
    target: Tensor


class Method(Protocol):
    """One quantization method.

    Attributes:
        refine_rounds: rounds of refinement after it, unless the user asks for another number.
        tunes: it has a `tune` of its own, so the full-precision hidden states must travel beside the quantized ones.
    """

    refine_rounds: int
    tunes: bool

    def rescale(
        self,
        group: LinearGroup,
        weights: Mapping[str, Tensor],
        stats: InputStats,
        schemes: Mapping[str, Scheme],
        scale_dtype: torch.dtype,
        loss: Loss | None,
    ) -> Tensor | None:
        """Choose s [channels] for the group's proved fold (x becomes x / s, W becomes W diag(s)), or None."""
        ...

    def round(
        self,
        weights: Mapping[str, Tensor],
        stats: InputStats,
        schemes: Mapping[str, Scheme],
        scale_dtype: torch.dtype,
    ) -> Rounding:
        """Round siblings, float32 [N, K] each, that share the input whose statistics are given."""
        ...

    def tune(
        self, weights: Mapping[str, Tensor], quantized: dict[str, QuantizedWeight], examples: Sequence[Example]
    ) -> dict[str, QuantizedWeight]:
        """Improve a rounded block by running it: the one verb that may use gradients. Called only if `tunes`.

        Args:
            weights: {linear: float32 [N, K]} after every fold, what `quantized` stands for.
        """
        ...


class Base:
    """No rescale, no tuning, no refinement: what most methods share."""

    refine_rounds = 0
    tunes = False

    def rescale(self, *_: Any, **__: Any) -> Tensor | None:
        """No fold pays."""
        return None

    def tune(
        self, weights: Mapping[str, Tensor], quantized: dict[str, QuantizedWeight], examples: Sequence[Example]
    ) -> dict[str, QuantizedWeight]:
        """Nothing to improve."""
        return quantized
