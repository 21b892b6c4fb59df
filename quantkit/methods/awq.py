"""AWQ: scaling salient input channels up before rounding, and folding the inverse into what produces them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from quantkit.group import Fold, LinearGroup
from quantkit.methods.base import Base, Loss, Rounding
from quantkit.methods.gptq import Gptq
from quantkit.methods.rtn import rtn_round
from quantkit.ops.affine import SHRINK, dequantize
from quantkit.ops.linalg import output_error
from quantkit.ops.stats import InputStats
from quantkit.scheme import Scheme

# numerics: the exponent is searched on a coarse grid, then one fine step to either side of its best
COARSE = (0.2, 0.4, 0.6, 0.8, 1.0)
FINE = 0.1
# rows of each linear and shrink factors that take part in the search; its result is checked with all rows
SEARCH_ROWS = 128
SEARCH_SHRINK = SHRINK[1::3]
# candidates, the best by the Gram matrix, that are judged again: by the loss where there is one, and by every sibling
FINALISTS = 3

Family = Callable[[float], Tensor]


class Awq(Base):
    """AWQ's rescale and clip search from second moments, then rounding to nearest and one round of refinement."""

    refine_rounds = 1

    def rescale(
        self,
        group: LinearGroup,
        weights: Mapping[str, Tensor],
        stats: InputStats,
        schemes: Mapping[str, Scheme],
        scale_dtype: torch.dtype,
        loss: Loss | None,
    ) -> Tensor | None:
        """Search s = mean|x|^a and mean|x|^a / mean|w|^(1-a); keep the best where it pays for every sibling.

        AWQ (Lin et al. 2023, arXiv:2306.00978, Eq. 4-5), its error taken from the Gram matrix:
        tr(E H Eᵀ) with E = Q(W diag(s)) diag(1/s) - W. Where `loss` is given it decides among the best by that error.

        Args:
            group: its fold says where 1/s goes; s may be shared between heads.
            weights: {name: float32 [N, K]} of the linears that read the input.
            loss: error of the enclosing module's output for given weights, or None.

        Returns:
            s float32 [fold.channels], or None when no candidate improves on s = 1 without leaving a sibling with a
            larger output error than without the fold.
        """
        fold = group.fold
        assert fold is not None

        def rounded(part: Mapping[str, Tensor], s: Tensor, shrink: Sequence[float] = SHRINK) -> dict[str, Tensor]:
            """The weights after rescaling by s [channels], rounding and scaling back."""
            k = fold.expand(s)
            moved = stats.rescaled(k).hessian
            return {
                name: dequantize(rtn_round(w * k, moved, schemes[name], scale_dtype, shrink)).div_(k)
                for name, w in part.items()
            }

        sample = {name: w[:: max(1, len(w) // SEARCH_ROWS)] for name, w in weights.items()}

        def score(s: Tensor) -> float:
            return sum(_errors(rounded(sample, s, SEARCH_SHRINK), sample, stats).values())

        activation = _per_channel(fold, stats.abs_mean)
        magnitude = _per_channel(fold, torch.stack([w.abs().mean(0) for w in weights.values()]).mean(0))
        plain = rounded(weights, torch.ones_like(activation))
        plain_errors = _errors(plain, weights, stats)
        best, best_loss = None, loss(plain) if loss else sum(plain_errors.values())
        for s in _search(score, _families(activation, magnitude))[:FINALISTS]:
            candidate = rounded(weights, s)
            errors = _errors(candidate, weights, stats)
            value = loss(candidate) if loss else sum(errors.values())
            if value < best_loss and all(errors[name] <= plain_errors[name] for name in weights):
                best, best_loss = s, value
                if loss is None:  # the order of the finalists is that of this very error
                    break
        return best

    def round(
        self,
        weights: Mapping[str, Tensor],
        stats: InputStats,
        schemes: Mapping[str, Scheme],
        scale_dtype: torch.dtype,
    ) -> Rounding:
        """Round to nearest; the clip search weighs errors inside a group by their correlations."""
        return Rounding({n: rtn_round(w, stats.hessian, schemes[n], scale_dtype) for n, w in weights.items()})


class AwqGptq(Gptq):
    """AWQ's rescale, then GPTQ."""

    rescale = Awq.rescale


def _families(activation: Tensor, magnitude: Tensor) -> tuple[Family, Family]:
    x = activation.clamp(min=1e-4 * float(activation.mean()) + 1e-30)
    w = magnitude.clamp(min=1e-4 * float(magnitude.mean()) + 1e-30)
    return (lambda a: _centred(x.pow(a)), lambda a: _centred(x.pow(a) / w.pow(1 - a)))


def _search(score: Callable[[Tensor], float], families: Sequence[Family]) -> list[Tensor]:
    """Candidates, best first: the coarse grid of each family, and fine steps around the best of all."""
    tried = [(score(s := family(a)), a, i, s) for i, family in enumerate(families) for a in COARSE]
    _, exponent, which, _ = min(tried, key=lambda entry: entry[:3])
    tried += [(score(s := families[which](a)), a, which, s) for a in (exponent - FINE, exponent + FINE)]
    return [s for _, _, _, s in sorted(tried, key=lambda entry: entry[:3])]


def _centred(s: Tensor) -> Tensor:
    """s with its extremes around 1 and bounded, so that no channel of a 16-bit norm over- or underflows."""
    return (s / (s.max() * s.min()).sqrt()).clamp_(1e-3, 1e3)


def _per_channel(fold: Fold, values: Tensor) -> Tensor:
    """Mean over the consumer heads that share a producer channel: [K] -> [channels]."""
    return values.view(-1, fold.repeat, fold.head_dim).mean(1).reshape(-1)


def _errors(rounded: Mapping[str, Tensor], weights: Mapping[str, Tensor], stats: InputStats) -> dict[str, float]:
    return {name: float(output_error(rounded[name] - w, stats.hessian).sum()) for name, w in weights.items()}
