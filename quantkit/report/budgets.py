"""Limits that a result must keep, read from text, and the judgement. A pure function of figures; imports no torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.errors import UsageError
from quantkit.recipe import parse_size
from quantkit.units import gigabytes

if TYPE_CHECKING:
    from quantkit.eval.compare import Divergence

_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*(%?)")


@dataclass(frozen=True, slots=True)
class Budgets:
    """What a user will accept; None sets no limit.

    Attributes:
        perplexity_increase: perplexity over that of the reference, less one.
        kl: mean KL divergence, nats per token.
        top1: smallest share of tokens with the same most likely token.
        size: bytes of the artifact's tensors.
    """

    perplexity_increase: float | None = None
    kl: float | None = None
    top1: float | None = None
    size: int | None = None

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.perplexity_increase, self.kl, self.top1, self.size))

    @property
    def needs_evaluation(self) -> bool:
        """Whether one of them can only be judged by measuring."""
        return any(limit is not None for limit in (self.perplexity_increase, self.kl, self.top1))


@dataclass(frozen=True, slots=True)
class Judgement:
    """One limit and what was found.

    Attributes:
        option: the option that set the limit, without dashes.
        said: the figure and the limit in words.
        value: the figure.
        met: whether it is within the limit; never where the figure is not finite.
    """

    option: str
    said: str
    value: float
    limit: float
    met: bool

    def to_json(self) -> dict[str, Any]:
        """The judgement as JSON values; a figure that is not finite becomes null."""
        return {
            "option": self.option,
            "said": self.said,
            "value": self.value if math.isfinite(self.value) else None,
            "limit": self.limit,
            "met": self.met,
        }


def read_budgets(
    max_perplexity_increase: str | None = None,
    max_kl: float | None = None,
    min_top1: str | None = None,
    max_size: str | None = None,
) -> Budgets:
    """Read limits as they stand on a command line.

    Raises:
        UsageError: one is no number of its kind.
    """
    if max_kl is not None and not 0 <= max_kl < math.inf:
        raise UsageError(f"`--max-kl` is {max_kl}, and must be a number of nats, 0 or more")
    top1 = None if min_top1 is None else _share("min-top1", min_top1)
    if top1 is not None and top1 > 1:
        raise UsageError(f"`--min-top1` is {min_top1}, and no share is above 1", "write it as 0.9 or 90%")
    return Budgets(
        perplexity_increase=(
            None if max_perplexity_increase is None else _share("max-perplexity-increase", max_perplexity_increase)
        ),
        kl=max_kl,
        top1=top1,
        size=None if max_size is None else parse_size(max_size),
    )


def judge(budgets: Budgets, found: Divergence | None, size: int) -> tuple[Judgement, ...]:
    """Hold the figures against the limits; a limit on what was not measured is left out.

    Args:
        size: bytes of the artifact's tensors.
    """
    judged = []
    if found is not None:
        increase = found.perplexity_ratio - 1
        if (limit := budgets.perplexity_increase) is not None:
            said = f"perplexity {increase:+.2%}, allowed {limit:+.2%}"
            judged.append(Judgement("max-perplexity-increase", said, increase, limit, increase <= limit))
        if (limit := budgets.kl) is not None:
            said = f"KL {found.kl.mean:.4g} nats per token, allowed {limit:g}"
            judged.append(Judgement("max-kl", said, found.kl.mean, limit, found.kl.mean <= limit))
        if (limit := budgets.top1) is not None:
            said = f"same most likely token for {found.kl.top1:.2%}, required {limit:.2%}"
            judged.append(Judgement("min-top1", said, found.kl.top1, limit, found.kl.top1 >= limit))
    if budgets.size is not None:
        said = f"{gigabytes(size)} of tensors, allowed {gigabytes(budgets.size)}"
        judged.append(Judgement("max-size", said, size, budgets.size, size <= budgets.size))
    return tuple(judged)


def _share(option: str, text: str) -> float:
    found = _SHARE.fullmatch(text.strip())
    if not found:
        raise UsageError(f"`--{option}` is `{text}`, which is no share", "write it as 3% or 0.03")
    return float(found[1]) / (100 if found[2] else 1)
