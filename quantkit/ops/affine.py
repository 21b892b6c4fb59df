"""The integer grid: choosing scales and zero points, rounding to codes, and back.

N out_features, K in_features, G groups, g group size; w = scale * (code - zero_point).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quantkit.qweight import QuantizedWeight
from quantkit.scheme import Scheme

# numerics: the range is multiplied by these and the best kept per group; above 1 pays for symmetric grids,
# whose negative side is one step longer; 1 itself keeps what already lies on the grid
SHRINK = tuple(round(1.06 - 0.03 * i, 2) for i in range(20))
# numerics: rows per slice such that a slice of the search stays in a core's cache
_SLICE_ELEMENTS = 1 << 17


def quantize(weight: Tensor, scale: Tensor, zero_point: Tensor, qmax: int) -> Tensor:
    """Round to the grid: codes as floats, in the shape of `weight`; scale and zero_point broadcast against it."""
    return weight.div(scale).round_().add_(zero_point).clamp_(0, qmax)


def dequantize(q: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight [N, K] that the codes stand for, computed in float32 and then cast to `dtype`."""
    if q.g_idx is not None:
        index = q.g_idx.long()
        scale, zero_point = q.scale.float()[:, index], q.zero_point.float()[:, index]
        return (q.codes.float().sub_(zero_point)).mul_(scale).to(dtype)
    groups = q.scale.shape[1]
    codes = q.codes.unflatten(1, (groups, -1)).float()
    return codes.sub_(q.zero_point.float()[..., None]).mul_(q.scale.float()[..., None]).flatten(1).to(dtype)


def search_qparams(
    weight: Tensor,
    moments: Tensor | None,
    scheme: Scheme,
    scale_dtype: torch.dtype,
    shrink: Sequence[float] = SHRINK,
) -> tuple[Tensor, Tensor]:
    """Choose scale and zero point per group by searching a shrink factor of its range (a clip of its extremes).

    Minimizes, for each row and group, the output error that rounding to nearest makes there: e H_g eᵀ with the group's
    block of the Gram matrix, or Σ_k h_k e_k² when only its diagonal is given. The range includes zero. The scale is
    rounded to `scale_dtype` before any code is chosen, so that the codes fit the scale that is stored.

    Args:
        weight: float32 [N, K].
        moments: float32 [K, K] (Gram matrix) or [K] (its diagonal), or None for equal weights.
        scale_dtype: the dtype of the scales in the file.
        shrink: factors of the range to try.

    Returns:
        scale in `scale_dtype` [N, G] and zero_point uint8 [N, G].
    """
    rows, columns = weight.shape
    group = scheme.group(columns)
    grouped = weight.unflatten(1, (-1, group))  # [N, G, g]
    weights = _group_moments(moments, columns, group, weight.device)
    scale = torch.empty(rows, columns // group, dtype=scale_dtype, device=weight.device)
    zero_point = torch.empty(rows, columns // group, dtype=torch.uint8, device=weight.device)
    step = max(1, _SLICE_ELEMENTS // columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        scale[part], zero_point[part] = _search_slice(grouped[part], weights, scheme, scale_dtype, shrink)
    return scale, zero_point


def _group_moments(moments: Tensor | None, columns: int, group: int, device: torch.device) -> Tensor:
    """Moments cut by group, [G, g] or [G, g, g], with mean one and a floor for groups that no token ever reached."""
    if moments is None or not bool((diagonal := moments if moments.dim() == 1 else moments.diagonal()).any()):
        return torch.ones(columns // group, group, device=device)
    floor = 1e-4 * diagonal.mean()
    if moments.dim() == 1:
        return ((moments + floor) / diagonal.mean()).unflatten(0, (-1, group))
    starts = range(0, columns, group)
    blocks = torch.stack([moments[k : k + group, k : k + group] for k in starts])
    blocks.diagonal(dim1=1, dim2=2).add_(floor)
    return blocks / diagonal.mean()


def _search_slice(
    w: Tensor, weights: Tensor, scheme: Scheme, dtype: torch.dtype, shrink: Sequence[float]
) -> tuple[Tensor, Tensor]:
    low = w.amin(-1).clamp_(max=0)  # [n, G]
    high = w.amax(-1).clamp_(min=0)
    if scheme.symmetric:
        high = torch.maximum(high, -low)
        low = -high
    base = (high - low) / scheme.qmax
    best = torch.full_like(base, torch.inf)
    # where no loss is finite nothing below is kept: the whole range stands
    best_scale = store_scale(base, dtype)
    best_zero = _zero_points(low, best_scale, scheme)
    for factor in shrink:
        scale = store_scale(base * factor, dtype)
        zero = _zero_points(low * factor, scale, scheme)
        error = quantize(w, scale[..., None], zero[..., None], scheme.qmax)
        error.sub_(zero[..., None]).mul_(scale[..., None]).sub_(w)
        loss = _group_loss(error, weights)
        better = loss < best
        best = torch.where(better, loss, best)
        best_scale = torch.where(better, scale, best_scale)
        best_zero = torch.where(better, zero, best_zero)
    return best_scale.to(dtype), best_zero.to(torch.uint8)


def _zero_points(low: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """The code of zero [n, G], as a float, for ranges that start at `low` <= 0."""
    if scheme.symmetric:
        return torch.full_like(scale, scheme.midpoint)
    return low.div(scale).neg_().round_().clamp_(0, scheme.qmax)


def _group_loss(error: Tensor, weights: Tensor) -> Tensor:
    """Loss [n, G] of errors [n, G, g]."""
    if weights.dim() == 2:
        return error.square_().mul_(weights).sum(-1)
    image = torch.bmm(error.transpose(0, 1), weights).transpose(0, 1)  # [n, G, g]
    return image.mul_(error).sum(-1)


def store_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 values that `dtype` holds exactly: rounded, and kept inside its normal range."""
    limits = torch.finfo(dtype)
    return scale.clamp(limits.tiny, limits.max).to(dtype).float()
