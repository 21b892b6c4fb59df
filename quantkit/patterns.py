"""Patterns on module names: which linears a user means. Strings and schemes only; imports no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

from quantkit.errors import UsageError
from quantkit.scheme import Override, Scheme

REGEX = "re:"
_WILDCARDS = re.compile(r"[*?\[]")


def match(pattern: str, name: str) -> bool:
    """Tell whether a pattern names a module.

    `re:REGEX` must match from the start of the name; `*`, `?` and `[` make a glob over the whole name, in which
    `*` crosses dots; anything else is the name itself or a run of its dotted components, so that `down_proj`
    and `layers.3` both match `model.layers.3.mlp.down_proj`.

    Raises:
        UsageError: the regular expression is none.
    """
    if pattern.startswith(REGEX):
        return _compiled(pattern).match(name) is not None
    if _WILDCARDS.search(pattern):
        return fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."


def assign(
    names: Sequence[str],
    default: Scheme,
    ignore: Iterable[str] = (),
    overrides: Iterable[Override] = (),
    always_kept: Collection[str] = (),
) -> dict[str, Scheme | None]:
    """Give every linear its scheme, or None where it stays in 16 bit.

    Later overrides win over earlier ones, field by field; `ignore` wins over all of them.

    Args:
        names: full module names, in the order the answer has.
        default: the scheme of a linear that no pattern names.
        ignore: patterns of linears to keep in 16 bit.
        overrides: scheme fields that differ, by pattern.
        always_kept: names among or beside `names` that are never quantized (`lm_head`). A pattern may name
            them, but it changes nothing.

    Raises:
        UsageError: a pattern matches nothing, or is not a regular expression.
    """
    everything = list(dict.fromkeys([*names, *always_kept]))
    schemes: dict[str, Scheme | None] = dict.fromkeys(everything, default)
    for override in overrides:
        for name in _matched(override.pattern, everything, "override"):
            scheme = schemes[name]
            schemes[name] = override.apply(scheme) if scheme else None
    for pattern in ignore:
        schemes.update(dict.fromkeys(_matched(pattern, everything, "ignore")))
    schemes.update(dict.fromkeys(always_kept))
    return schemes


def closest(word: str, options: Iterable[str]) -> str:
    """Name the option most like `word`, or "" when none is."""
    found = difflib.get_close_matches(word, list(options), n=1, cutoff=0.6)
    return found[0] if found else ""


def _matched(pattern: str, names: Sequence[str], option: str) -> list[str]:
    found = [name for name in names if match(pattern, name)]
    if not found:
        raise UsageError(f"`--{option}` pattern `{pattern}` matches no linear", _suggestion(pattern, names))
    return found


def _suggestion(pattern: str, names: Sequence[str]) -> str:
    """Say which patterns would match: last components, and names with their numbers replaced by `*`."""
    tails = dict.fromkeys(name.rpartition(".")[2] for name in names)
    shapes = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    near = closest(pattern, [*tails, *shapes])
    if near:
        return f"did you mean `{near}`?"
    return f"the linears of this model end in {', '.join(f'`{tail}`' for tail in list(tails)[:12])}" if names else ""


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix(REGEX))  # re keeps a cache of its own
    except re.error as problem:
        raise UsageError(f"pattern `{pattern}` is not a regular expression: {problem}") from None
