"""Refinement of a rounded weight: better scales for its codes, better codes for its scales, in turn."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantkit.ops.affine import dequantize, store_scale
from quantkit.qweight import QuantizedWeight

DAMP = 0.05
BLOCK = 64


def refine(
    weight: Tensor, q: QuantizedWeight, hessian: Tensor, rounds: int, *, damp: float = DAMP, block_size: int = BLOCK
) -> QuantizedWeight:
    """Lower tr(E H Eᵀ), E = W - Ŵ, by alternating two exact coordinate descents.

    Scales: for one group at a time, the least-squares scale for its codes, c = code - zero_point:
    s ← s + (E H)_g · c / (c H_gg cᵀ), rounded to its stored dtype and kept where the trace falls.
    Codes: for one column at a time, the code nearest to ŵ_k + (E H)_k / H_kk.
    Neither step ever raises the trace (of the damped H), so the result is never worse on the calibration data.

    Args:
        weight: float32 [N, K], what the codes stand for.
        hessian: float32 [K, K], the sum of x xᵀ over calibration tokens.
        rounds: alternations; 0 returns `q` itself.
        damp: fraction of mean(diag H) added to the diagonal. Holds the fit back where the tokens say little.

    Returns:
        The weight with new codes and scales; zero points are kept.
    """
    mean = hessian.diagonal().mean()
    if rounds < 1 or not float(mean) > 0:
        return q
    damped = hessian.clone()
    damped.diagonal().add_(damp * mean)
    for _ in range(rounds):
        q = _refine_codes(weight, _refine_scales(weight, q, damped), damped, block_size)
    return q


def _refine_scales(weight: Tensor, q: QuantizedWeight, hessian: Tensor) -> QuantizedWeight:
    columns = weight.shape[1]
    group = q.scheme.group(columns)
    scale = q.scale.float()
    steps = q.codes.unflatten(1, (-1, group)).float() - q.zero_point.float()[..., None]  # [N, G, g]
    error = weight - dequantize(q)
    for g in range(columns // group):
        part = slice(g * group, (g + 1) * group)
        c = steps[:, g]
        pull = (error @ hessian[:, part]).mul_(c).sum(1)  # [N]
        curvature = (c @ hessian[part, part]).mul_(c).sum(1)
        old = scale[:, g]
        new = store_scale(
            torch.where(curvature > 0, old + pull / curvature, old).clamp(old / 2, old * 2), q.scale.dtype
        )
        move = new - old
        move = torch.where(move * (move * curvature - 2 * pull) < 0, move, torch.zeros_like(move))
        scale[:, g] += move
        error[:, part] -= move[:, None] * c
    return replace(q, scale=scale.to(q.scale.dtype))


def _refine_codes(weight: Tensor, q: QuantizedWeight, hessian: Tensor, block_size: int) -> QuantizedWeight:
    columns = weight.shape[1]
    group = q.scheme.group(columns)
    error = (weight - dequantize(q)).T.contiguous()  # [K, N]
    codes = q.codes.T.contiguous()
    scale, zero_point = q.scale.float().T.contiguous(), q.zero_point.float().T.contiguous()  # [G, N]
    target = weight.T
    for start in range(0, columns, block_size):
        stop = min(start + block_size, columns)
        pull = hessian[start:stop] @ error  # [B, N]
        for k in range(start, stop):
            i = k - start
            s, z = scale[k // group], zero_point[k // group]
            ideal = target[k] - error[k] + pull[i] / hessian[k, k]
            code = ideal.div_(s).round_().add_(z).clamp_(0, q.scheme.qmax)
            codes[k] = code
            new = target[k] - code.sub_(z).mul_(s)
            pull[i + 1 :].addr_(hessian[k + 1 : stop, k], new - error[k])
            error[k] = new
    return replace(q, codes=codes.T.contiguous())
