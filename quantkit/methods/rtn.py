"""Rounding to nearest, on a grid searched per group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quantkit.methods.base import Base, Rounding
from quantkit.ops.affine import SHRINK, quantize, search_qparams
from quantkit.ops.stats import InputStats
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import Scheme


def rtn_round(
    weight: Tensor,
    moments: Tensor | None,
    scheme: Scheme,
    scale_dtype: torch.dtype,
    shrink: Sequence[float] = SHRINK,
) -> QuantizedWeight:
    """Round each weight to the nearest code of a grid chosen by `search_qparams`.

    Args:
        weight: float32 [N, K].
        moments: float32 [K, K] (H) or [K] (diag H), or None: what the grid search weighs errors by.
        scale_dtype: dtype of the stored scales.
        shrink: factors of the range that the search tries.
    """
    scale, zero_point = search_qparams(weight, moments, scheme, scale_dtype, shrink)
    grouped = weight.unflatten(1, (scale.shape[1], -1))
    codes = quantize(grouped, scale.float()[..., None], zero_point.float()[..., None], scheme.qmax)
    return QuantizedWeight(codes.flatten(1).to(torch.uint8), scale, zero_point, scheme)


class Rtn(Base):
    """Round to nearest (no error feedback)."""

    def round(
        self,
        weights: Mapping[str, Tensor],
        stats: InputStats,
        schemes: Mapping[str, Scheme],
        scale_dtype: torch.dtype,
    ) -> Rounding:
        return Rounding({n: rtn_round(w, stats.importance, schemes[n], scale_dtype) for n, w in weights.items()})
