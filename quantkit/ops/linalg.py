"""Factoring Gram matrices that may be singular, and the error they define."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.errors import NumericalError

# numerics: fractions of mean(diag H); each step is tried when the one before does not factor
DAMPING_LADDER = (1.0, 3.0, 10.0, 30.0, 100.0)


def damped_cholesky(hessian: Tensor, order: Tensor, damp: float) -> tuple[Tensor, float]:
    """Factor P (H + d I) Pᵀ = L Lᵀ, raising d until it works.

    Args:
        hessian: float32 [K, K], symmetric positive semidefinite. Not modified.
        order: int64 [K], the permutation P.
        damp: first damping as a fraction of mean(diag H); the ladder multiplies it.

    Returns:
        L float32 [K, K] lower triangular, and the fraction that was needed.

    Raises:
        NumericalError: no step of the ladder factored.
    """
    mean = hessian.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    info = torch.empty(0, dtype=torch.int32, device=hessian.device)
    for step in DAMPING_LADDER:
        permuted = hessian[order[:, None], order[None, :]]
        permuted.diagonal().add_(damp * step * mean)
        # a transposed view is column-major, which the routine factors in place: one copy of the matrix less
        factor, info = torch.linalg.cholesky_ex(permuted.T, out=(permuted.T, info))
        if int(info) == 0 and bool(torch.isfinite(factor.diagonal()).all()):
            return factor, damp * step
        del factor, permuted
    raise NumericalError(
        f"a Gram matrix of {len(order)} channels has no factor with damping up to {damp * DAMPING_LADDER[-1]:g}",
        "look for non-finite or huge activations, or use more calibration tokens",
    )


def output_error(error: Tensor, hessian: Tensor) -> Tensor:
    """float32 [N]: diag(E H Eᵀ), the squared output error of each row of E [N, K] over the calibration tokens."""
    return torch.einsum("nk,nk->n", error @ hessian, error)
