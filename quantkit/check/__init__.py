"""What an engine will load, and on which kernels, from names, shapes and schemes alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from quantkit.check.case import Case
from quantkit.check.nearest import nearest
from quantkit.engines import ENGINES
from quantkit.engines.base import Schemes
from quantkit.engines.judgement import Judgement
from quantkit.engines.units import Shape

ALWAYS_KEPT = ("lm_head",)  # never quantized, whatever patterns say

__all__ = ["ALWAYS_KEPT", "Judgement", "judge", "recommended_first", "refusals"]


def judge(
    shapes: Mapping[str, Shape],
    schemes: Schemes,
    format: str,
    target: str,
    *,
    tp: int = 1,
    config: Mapping[str, Any] | None = None,
    fp8_cache: bool = False,
    stored: bool = False,
    quirks: frozenset[str] = frozenset(),
) -> Judgement:
    """Ask an engine about a model in one format.

    Args:
        shapes: {linear: (out_features, in_features)} by checkpoint name.
        schemes: {linear: Scheme, or None where it stays in 16 bit}, for the same names.
        format: one of FORMATS.
        target: one of ENGINES.
        tp: tensor-parallel ranks.
        config: config.json, for head counts, the hidden size and the dtype.
        fp8_cache: scales of an FP8 cache come with it.
        stored: the model is packed already, so that a hint may not change its schemes.
        quirks: what is unusual about a stored one; see `quantkit.engines.base.Model`.

    Raises:
        UsageError: no such engine or format, or the engine has no tensor parallelism.
    """
    case = Case.open(shapes, schemes, format, target, tp, config or {}, fp8_cache, stored, quirks)
    found = case.judge()
    return found if found.loads else replace(found, hint=nearest(case, found))


def refusals(
    shapes: Mapping[str, Shape],
    schemes: Schemes,
    format: str,
    target: str,
    *,
    tp: int = 1,
    config: Mapping[str, Any] | None = None,
) -> dict[str, tuple[str, str]]:
    """{linear: (message, hint)} of those that would not load; arguments and errors are those of `judge`.

    Parts of a fused matrix are refused together, also where only one of them is the cause.
    """
    found = Case.open(shapes, schemes, format, target, tp, config or {}).judge()
    return {
        name: (f"{target}: {verdict.line()}", verdict.answer.hint)
        for verdict in found.refused
        for name in verdict.names
    }


def recommended_first(judgements: Iterable[Judgement]) -> list[Judgement]:
    """Put what loads first, then what loads on faster kernels, then what the engine takes best."""

    def rank(found: Judgement) -> tuple[bool, int, int]:
        slow = sum(len(verdict.names) for verdict in found.slow)
        formats = ENGINES[found.engine].formats
        return not found.loads, slow, formats.index(found.format) if found.format in formats else len(formats)

    return sorted(judgements, key=rank)
