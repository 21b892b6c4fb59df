"""The choices closest to what was asked under which an engine would load everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from quantkit.check.case import Case, leaf
from quantkit.engines.judgement import Judgement
from quantkit.formats import FORMATS

GROUPS = (128, 64, 32)  # that engines have kernels for, besides whole rows


def nearest(case: Case, found: Judgement) -> str:
    """Name the choices closest to what was asked under which everything loads."""
    own = dict.fromkeys(verdict.answer.hint for verdict in found.refused)
    ranks = [(f"`--tp {tp}`", case.at(tp)) for tp in range(case.tp - 1, 0, -1) if case.tp % tp == 0]
    others = [name for name in case.engine.formats if name != case.format and name in FORMATS]
    command = "quantkit convert " if case.stored else ""
    unpacked = replace(case, stored=False, quirks=frozenset())
    formats = [(f"`{command}--format {name}`", replace(unpacked, format=name)) for name in others]
    if all(own):
        return ", or ".join(filter(None, ["; ".join(own), _first(formats)]))
    if case.stored:
        choices = [_first(ranks), _first(formats)]
        return ", or ".join(filter(None, choices)) or "quantize the 16-bit model again for this engine"
    schemes = _other_schemes(case, found)
    choices = [_first(group) for group in (*schemes, ranks, formats)]
    if not any(choices):
        choices = [_first(_both(group, ranks + formats)) for group in schemes]
    if not any(choices):
        alone = [choice for group in (*schemes, formats) for choice in group]
        both = [choice for group in schemes for choice in _both(group, formats)]
        choices = [_keeping_least([("", case), *alone, *both])]
    return ", or ".join(filter(None, choices)) or "no option changes that: choose another engine"


Choice = tuple[str, Case]


def _other_schemes(case: Case, found: Judgement) -> list[list[Choice]]:
    """Other group sizes, the closest first, and fixed zero points."""
    lost = {case.schemes[name] for verdict in found.refused for name in verdict.names} - {None}
    asked = {scheme.group_size for scheme in lost if scheme}
    smaller = [size for size in GROUPS if any(size < group for group in asked)]
    sizes = [*smaller, *(size for size in reversed(GROUPS) if size not in smaller), -1]
    groups = [(f"`--group-size {size}`", _with(case, asked, group_size=size)) for size in sizes if {size} != asked]
    symmetric = [("`--symmetric`", _with(case, asked, symmetric=True))]
    bits = [("`--bits 4`", _with(case, asked, bits=4))]
    return [
        groups,
        symmetric if any(scheme and not scheme.symmetric for scheme in lost) else [],
        bits if any(scheme and scheme.bits != 4 for scheme in lost) else [],
    ]


def _with(case: Case, groups: set[int], **changes: Any) -> Case:
    """Change the schemes of these group sizes."""
    schemes = {
        name: replace(scheme, **changes) if scheme and scheme.group_size in groups else scheme
        for name, scheme in case.schemes.items()
    }
    return replace(case, schemes=schemes)


def _both(first: list[Choice], second: list[Choice]) -> Iterator[Choice]:
    for text, case in first:
        for also, other in second:
            yield f"{text} with {also}", replace(other, schemes=case.schemes)


def _keeping_least(choices: Iterable[Choice]) -> str:
    """The choice that leaves the fewest linears in 16 bit, with the patterns that name those."""
    fewest, found = -1, ""
    for text, case in choices:
        lost = dict.fromkeys(name for verdict in case.judge().refused for name in verdict.names)
        # a pattern takes every linear of the name, so that those are what it costs
        leaves = dict.fromkeys(leaf(name) for name in lost)
        schemes = {name: None if leaf(name) in leaves else scheme for name, scheme in case.schemes.items()}
        kept = replace(case, schemes=schemes)
        if (fewest < 0 or len(case.packed) - len(kept.packed) < fewest) and kept.packed and kept.judge().loads:
            fewest = len(case.packed) - len(kept.packed)
            patterns = " ".join(f"--ignore '*.{each}'" for each in leaves)
            joined = f"{text} {'and' if ' with ' in text else 'with'} "
            found = f"{joined if text else ''}`{patterns}`"
    return found


def _first(choices: Iterable[Choice]) -> str:
    """The first choice under which everything loads, and something is quantized."""
    return next((text for text, case in choices if case.packed and case.judge().loads), "")
