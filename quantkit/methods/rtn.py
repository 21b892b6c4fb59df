"""Rounding to nearest, on a grid searched per group."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.methods.base import Base, Rounding
from quantkit.ops.affine import quantize, search_qparams
from quantkit.ops.stats import InputStats
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import Scheme


def rtn_round(weight: Tensor, importance: Tensor | None, scheme: Scheme, scale_dtype: torch.dtype) -> QuantizedWeight:
    """Round each weight to the nearest code of a grid chosen by `search_qparams`.

    Args:
        weight: float32 [N, K].
        importance: float32 [K], diag(H), or None.
        scale_dtype: dtype of the stored scales.
    """
    scale, zero_point = search_qparams(weight, importance, scheme, scale_dtype)
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
