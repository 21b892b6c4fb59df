"""GPTQ: rounding column by column, each column's error moved onto the columns still to come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import NumericalError
from quantkit.methods.base import Base, Rounding
from quantkit.methods.rtn import rtn_round
from quantkit.ops.affine import search_qparams
from quantkit.ops.linalg import damped_cholesky
from quantkit.ops.stats import InputStats
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import Scheme

DAMP = 0.01
BLOCK = 64
# siblings are solved together up to this many rows: past it a stack gains no speed and costs memory
STACK_ROWS = 8192


@dataclass(frozen=True, slots=True)
class Factored:
    """A Gram matrix made ready for rounding; shared by every weight that reads the input.

    Attributes:
        order: int64 [K], columns by growing diag(H); they are visited from the last to the first.
        factor: float32 [K, K], lower triangular L of P (H + d I) Pᵀ = L Lᵀ.
        importance: float32 [K], diag(H).
        damp: d as a fraction of mean(diag H).
    """

    order: Tensor
    factor: Tensor
    importance: Tensor
    damp: float


def factorize(hessian: Tensor, damp: float = DAMP) -> Factored:
    """Factor a Gram matrix, float32 [K, K], with as much damping as it needs.

    Raises:
        NumericalError: every step of the damping ladder failed.
    """
    importance = hessian.diagonal()
    order = torch.argsort(importance, stable=True)
    factor, used = damped_cholesky(hessian, order, damp)
    return Factored(order, factor, importance, used)


def gptq_round(
    weight: Tensor, factored: Factored, scheme: Scheme, scale_dtype: torch.dtype, *, block_size: int = BLOCK
) -> QuantizedWeight:
    """Round a weight column by column, moving each column's error onto the columns still to come.

    GPTQ (Frantar et al. 2022, arXiv:2210.17323, Algorithm 1) in the equivalent form of LDLQ (Chee et al. 2023, QuIP,
    arXiv:2307.13304, Theorem 6): with P H Pᵀ = L Lᵀ and columns visited from last to first, column k is rounded at
    w_k + Σ_{j>k} (w_j - ŵ_j) L_jk / L_kk. One factorization and no inverse. Columns are visited by decreasing
    diag(H), and the grid of every group is chosen from the original weights first (static groups), so the file needs no
    g_idx. The result does not depend on block_size; it only groups the updates into matrix products.

    Args:
        weight: float32 [N, K]. Not modified.
        factored: the input's Gram matrix; its scale cancels.
        scale_dtype: dtype of the stored scales.
    """
    order = factored.order
    scale, zero_point = search_qparams(weight, factored.importance, scheme, scale_dtype)
    codes = _feed_back(
        weight.T.index_select(0, order),
        factored.factor,
        scale.float().T,
        zero_point.float().T,
        order // scheme.group(len(order)),
        scheme.qmax,
        block_size,
    )
    result = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    result[:, order] = codes.T
    return QuantizedWeight(result, scale, zero_point, scheme)


def _feed_back(
    weight: Tensor, factor: Tensor, scale: Tensor, zero_point: Tensor, group_of: Tensor, qmax: int, block_size: int
) -> Tensor:
    """Codes uint8 [K, N] for weight [K, N], one column of the layer per row; scale and zero_point [G, N]."""
    columns = len(weight)
    error = torch.zeros_like(weight)  # w - ŵ, for the columns already rounded
    codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    groups = group_of.tolist()
    for start in reversed(range(0, columns, block_size)):
        stop = min(start + block_size, columns)
        unit = factor[start:, start:stop] / factor.diagonal()[start:stop]  # [K - start, B], unit lower triangular
        target = weight[start:stop].addmm(unit[stop - start :].T, error[stop:])
        for k in reversed(range(start, stop)):
            i = k - start
            column = torch.addmv(target[i], error[k + 1 : stop].T, unit[i + 1 : stop - start, i])
            s, z = scale[groups[k]], zero_point[groups[k]]
            code = column.div_(s).round_().add_(z).clamp_(0, qmax)
            codes[k] = code
            torch.addcmul(weight[k], code.sub_(z), s, value=-1, out=error[k])
    return codes


class Gptq(Base):
    """GPTQ with static groups, act-order, stacked siblings and a damping ladder."""

    def round(
        self,
        weights: Mapping[str, Tensor],
        stats: InputStats,
        schemes: Mapping[str, Scheme],
        scale_dtype: torch.dtype,
    ) -> Rounding:
        """Round siblings with one factorization; to nearest, and saying so, where none exists."""
        try:
            factored = factorize(stats.hessian)
        except NumericalError as error:
            nearest = {n: rtn_round(w, stats.importance, schemes[n], scale_dtype) for n, w in weights.items()}
            return Rounding(nearest, fallback=f"rounded to nearest: {error.message}")
        rounded: dict[str, QuantizedWeight] = {}
        for names in _stacks(weights, schemes):
            # rows are independent given H; concatenating a single weight would only copy it
            stacked = torch.cat([weights[name] for name in names]) if len(names) > 1 else weights[names[0]]
            q = gptq_round(stacked, factored, schemes[names[0]], scale_dtype)
            rounded |= dict(zip(names, split_rows(q, [len(weights[name]) for name in names]), strict=True))
        raised = f"damping raised to {factored.damp:g}" if factored.damp > DAMP else ""
        return Rounding(rounded, factored.damp, raised)


def _stacks(weights: Mapping[str, Tensor], schemes: Mapping[str, Scheme]) -> list[list[str]]:
    """Names of siblings that are solved together: of one scheme, and of few rows."""
    stacks: list[list[str]] = []
    for scheme in dict.fromkeys(schemes[name] for name in weights):
        rows = STACK_ROWS  # so that the first sibling starts a stack
        for name in (name for name in weights if schemes[name] == scheme):
            if rows + len(weights[name]) > STACK_ROWS:
                stacks.append([])
                rows = 0
            stacks[-1].append(name)
            rows += len(weights[name])
    return stacks


def split_rows(q: QuantizedWeight, rows: list[int]) -> list[QuantizedWeight]:
    """Cut a stacked weight back into its siblings."""
    parts = zip(q.codes.split(rows), q.scale.split(rows), q.zero_point.split(rows), strict=True)
    return [QuantizedWeight(codes, scale, zero, q.scheme, q.g_idx) for codes, scale, zero in parts]
