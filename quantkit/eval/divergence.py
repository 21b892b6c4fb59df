"""How far one distribution over the next token is from another: per token, and summed up. Knows no model.

T tokens, V vocabulary, W windows. All of it is float64: a divergence near the noise floor is a small difference of
large numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from quantkit.eval.windows import ratio_estimate

PERCENTS = (50.0, 75.0, 90.0, 95.0, 98.0, 99.0, 99.5, 99.8, 99.9)
EDGES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)  # of the reference's confidence


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """What is known about each scored token, in the order of the text.

    Attributes:
        kl: KL(reference || other), nats, float64 [T].
        agree: both find the same token most likely, bool [T].
        nll_reference: loss of the reference, nats, float64 [T].
        nll: loss of the other, nats, float64 [T].
        confidence: highest probability that the reference gives to a token, float64 [T].
    """

    kl: Tensor
    agree: Tensor
    nll_reference: Tensor
    nll: Tensor
    confidence: Tensor

    @classmethod
    def joined(cls, parts: Sequence[TokenScores]) -> TokenScores:
        """The scores of several texts after each other."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in cls.__slots__))


@dataclass(frozen=True, slots=True)
class Spread:
    """The divergences of many tokens.

    Attributes:
        tokens: how many.
        mean: nats per token; each token weighs the same.
        stderr: standard error of `mean`, taking windows as the independent units; nan with one window.
        percentiles: (percent, nats), ascending; linear between the two nearest tokens.
        maximum: nats.
        top1: share of tokens for which both find the same one most likely.
        top1_stderr: standard error of `top1`, by windows.
    """

    tokens: int
    mean: float
    stderr: float
    percentiles: tuple[tuple[float, float], ...]
    maximum: float
    top1: float
    top1_stderr: float

    def at(self, percent: float) -> float:
        """One of `percentiles`, nats."""
        return dict(self.percentiles)[percent]

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values; nan, of one window, becomes null."""
        values = asdict(self) | {
            "median": self.at(50.0),
            "percentiles": {f"{percent:g}": value for percent, value in self.percentiles},
        }
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value for name, value in values.items()
        }


@dataclass(frozen=True, slots=True)
class Bin:
    """Tokens for which the reference's confidence lies in [low, high), the last bin with its upper end.

    Attributes:
        mean: mean divergence, nats.
        top1: share of tokens for which both find the same one most likely.
    """

    low: float
    high: float
    tokens: int
    mean: float
    top1: float


def score(reference: Tensor, other: Tensor, targets: Tensor) -> TokenScores:
    """Compare two distributions over the token that follows.

    KL(p || q) = Σ p (ln p - ln q), over the whole vocabulary.

    Args:
        reference: log-probabilities, float64 [T, V]; see `log_probabilities`.
        other: log-probabilities, float64 [T, V].
        targets: the tokens that follow, int64 [T].
    """
    probabilities = reference.exp()
    # clamped, since rounding may leave -1e-16 where both are the same but for their last bits
    kl = (probabilities * (reference - other)).sum(-1).clamp_min(0)
    likeliest, first = reference.max(-1)
    return TokenScores(
        kl=kl.cpu(),
        agree=(other.argmax(-1) == first).cpu(),
        nll_reference=-reference.gather(1, targets[:, None])[:, 0].cpu(),
        nll=-other.gather(1, targets[:, None])[:, 0].cpu(),
        confidence=likeliest.exp().cpu(),
    )


def log_probabilities(logits: Tensor) -> Tensor:
    """Log-probabilities, float64, of logits [T, V]."""
    return logits.double().log_softmax(-1)


def spread(scores: TokenScores, scored: Sequence[int]) -> Spread:
    """Sum up the divergences of all tokens.

    Args:
        scored: how many of the tokens, in order, belong to each window.
    """
    counts = torch.tensor(scored, dtype=torch.float64)
    mean, stderr = ratio_estimate(window_sums(scores.kl, scored), counts)
    top1, top1_stderr = ratio_estimate(window_sums(scores.agree.double(), scored), counts)
    return Spread(
        tokens=len(scores.kl),
        mean=mean,
        stderr=stderr,
        percentiles=tuple(zip(PERCENTS, percentiles(scores.kl, PERCENTS), strict=True)),
        maximum=float(scores.kl.max()),
        top1=top1,
        top1_stderr=top1_stderr,
    )


def by_confidence(scores: TokenScores) -> tuple[Bin, ...]:
    """Mean divergence by how sure the reference is; bins without a token are left out."""
    bins = []
    for low, high in pairwise(EDGES):
        # the last bin takes a confidence that rounding lifted above 1
        inside = (scores.confidence >= low) & ((scores.confidence < high) | (high == EDGES[-1]))
        if count := int(inside.sum()):
            bins.append(
                Bin(low, high, count, float(scores.kl[inside].mean()), float(scores.agree[inside].double().mean()))
            )
    return tuple(bins)


def window_sums(values: Tensor, scored: Sequence[int]) -> Tensor:
    """Sums, float64 [W], of values [T] of which `scored` belong to each window, in order."""
    return torch.stack([part.sum() for part in values.split(list(scored))])


def percentiles(values: Tensor, percents: Sequence[float]) -> list[float]:
    """Percentiles of values [T], linear between the two nearest; of any number of them, unlike torch.quantile."""
    ordered = values.sort().values
    found = []
    for percent in percents:
        place = percent / 100 * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        found.append(float(ordered[low] + (ordered[high] - ordered[low]) * (place - low)))
    return found
