"""Random weights and calibration inputs with what makes real ones hard: correlated channels, some of them large."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quantkit.methods.gptq import BLOCK, DAMP, factorize, gptq_round
from quantkit.ops.stats import InputStats
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import Scheme

SCHEMES = [
    Scheme(4, 32, True),
    Scheme(4, 16, False),
    Scheme(4, -1, False),
    Scheme(4, -1, True),
    Scheme(8, 32, False),
    Scheme(8, -1, True),
]


def correlated(tokens: int, features: int, seed: int = 0) -> Tensor:
    """Inputs float32 [tokens, features] of a few strong directions, with a heavy tail of channel sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features // 4, features, generator=generator)
    x = torch.randn(tokens, features // 4, generator=generator) @ mixing
    x += 0.5 * torch.randn(tokens, features, generator=generator)
    return x * torch.randn(features, generator=generator).exp()


def weight(rows: int, features: int, seed: int = 0) -> Tensor:
    """A weight float32 [rows, features] with a few outliers."""
    generator = torch.Generator().manual_seed(100 + seed)
    w = torch.randn(rows, features, generator=generator) * 0.05
    return torch.where(torch.rand(rows, features, generator=generator) < 0.01, w * 6, w)


def stats_of(x: Tensor) -> InputStats:
    """Statistics of x [tokens, features], the way a run gathers them."""
    stats = InputStats.empty(x.shape[1])
    stats.add(x)
    return stats.finish()


def dequantize(q: QuantizedWeight) -> np.ndarray:
    """(code - zero_point) * scale in numpy, float32 [N, K]."""
    codes, zero, scale = q.codes.numpy().astype(np.float32), q.zero_point.numpy(), q.scale.float().numpy()
    group = codes.shape[1] // scale.shape[1]
    return (codes - zero.repeat(group, axis=1).astype(np.float32)) * scale.repeat(group, axis=1)


def output_error(q: QuantizedWeight, w: Tensor, x: Tensor) -> float:
    """Squared error of the outputs x W^T, relative to the outputs."""
    e = (torch.from_numpy(dequantize(q)) - w).double()
    return float((x.double() @ e.T).square().sum() / (x.double() @ w.double().T).square().sum())


def rows_that_differ(left: QuantizedWeight, right: QuantizedWeight) -> int:
    """Rows whose codes are not all equal. A rounding tie that falls the other way changes the rest of its row."""
    assert torch.equal(left.scale, right.scale) and torch.equal(left.zero_point, right.zero_point)
    return int((left.codes != right.codes).any(1).sum())


def require_sound(q: QuantizedWeight, shape: torch.Size) -> None:
    """Codes and zero points in range, scales finite and positive, symmetric ones centred."""
    scheme = q.scheme
    assert q.codes.shape == shape and q.codes.dtype == q.zero_point.dtype == torch.uint8
    assert int(q.codes.max()) <= scheme.qmax and int(q.zero_point.max()) <= scheme.qmax
    assert torch.isfinite(q.scale).all() and (q.scale > 0).all()
    assert q.scale.shape == q.zero_point.shape == (shape[0], shape[1] // scheme.group(shape[1]))
    if scheme.symmetric:
        assert (q.zero_point == scheme.midpoint).all()


def solve(
    w: Tensor, hessian: Tensor, scheme: Scheme, dtype: torch.dtype, *, damp: float = DAMP, block_size: int = BLOCK
) -> tuple[QuantizedWeight, float]:
    """GPTQ from a Gram matrix [K, K]: the weight, and the damping that its factorization took."""
    factored = factorize(hessian, damp)
    return gptq_round(w, factored, scheme, dtype, block_size=block_size), factored.damp
