"""Second moments of a linear's input: all that any method needs to know about the calibration data.

K in_features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# numerics: a panel of the Gram matrix is one matrix product; only panels on or above the diagonal are computed
_PANEL = 256


@dataclass(slots=True)
class InputStats:
    """Sums over calibration tokens of the input x of one LinearGroup.

    Attributes:
        hessian: float32 [K, K], the sum of x xᵀ. Read it through `gram` while rows are still being added.
        abs_sum: float32 [K], the sum of |x|.
        count: tokens.
    """

    hessian: Tensor
    abs_sum: Tensor
    count: int = 0

    @classmethod
    def empty(cls, in_features: int, device: torch.device | str = "cpu") -> InputStats:
        return cls(torch.zeros(in_features, in_features, device=device), torch.zeros(in_features, device=device))

    def add(self, x: Tensor) -> None:
        """Accumulate rows x [..., K] in float32; only the upper block triangle, until `finish`."""
        rows = x.reshape(-1, x.shape[-1]).float()
        columns = rows.shape[1]
        for start in range(0, columns, _PANEL):
            stop = min(start + _PANEL, columns)
            self.hessian[start:stop, start:].addmm_(rows[:, start:stop].T, rows[:, start:])
        self.abs_sum += rows.abs().sum(0)
        self.count += len(rows)

    def finish(self) -> InputStats:
        """Mirror the upper triangle into the lower one, panel by panel, and return self."""
        columns = len(self.hessian)
        for start in range(0, columns, _PANEL):
            stop = min(start + _PANEL, columns)
            square = self.hessian[start:stop, start:stop]
            square.copy_(square.triu() + square.triu(1).T)
            self.hessian[stop:, start:stop] = self.hessian[start:stop, stop:].T
        return self

    @property
    def importance(self) -> Tensor:
        """float32 [K], the diagonal of the Hessian: Σ x²."""
        return self.hessian.diagonal()

    @property
    def abs_mean(self) -> Tensor:
        """float32 [K], mean |x| per channel."""
        return self.abs_sum / max(self.count, 1)

    def rescaled(self, s: Tensor) -> InputStats:
        """Statistics of x / s for s [K]; the receiver is unchanged."""
        hessian = self.hessian / s
        return InputStats(hessian.div_(s[:, None]), self.abs_sum / s, self.count)
