"""What a method is: three verbs over tensors. A method never sees a model, a file or an architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        fallback: reason why another method was used instead, or "".
    """

    weights: dict[str, QuantizedWeight]
    damp: float | None = None
    fallback: str = ""


class Method(Protocol):
    """One quantization method."""

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

    def tune(self, block: Any, quantized: dict[str, QuantizedWeight], stream: Any) -> dict[str, QuantizedWeight]:
        """Improve a rounded block by running it: the one verb that may use gradients."""
        ...


class Base:
    """No rescale, no tuning: what most methods share."""

    def rescale(self, *_: Any, **__: Any) -> Tensor | None:
        return None

    def tune(self, block: Any, quantized: dict[str, QuantizedWeight], stream: Any) -> dict[str, QuantizedWeight]:
        return quantized
