"""Which scheme each linear gets: what was asked, bent or refused by the laws of formats and engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from quantkit.check import ALWAYS_KEPT, judge, refusals
from quantkit.checkpoint.reader import Checkpoint
from quantkit.engines import ENGINES
from quantkit.errors import UnsupportedScheme, UsageError
from quantkit.events import Fallback
from quantkit.formats import FORMATS, Format
from quantkit.patterns import assign
from quantkit.recipe import Recipe
from quantkit.scheme import Scheme, legal_groups

SERVED_GROUPS = (128, 64, 32)


def choose_schemes(
    recipe: Recipe, source: Checkpoint, shapes: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, Scheme | None], tuple[Fallback, ...]]:
    """Give every linear its scheme, as the recipe, the formats and the target engine allow.

    Args:
        shapes: {linear: (out_features, in_features)} of the blocks.

    Returns:
        {linear: Scheme, or None where it stays in 16 bit}, and where that differs from what was asked.

    Raises:
        UnsupportedScheme: a linear fits no such scheme, and the recipe does not say what to do then.
        UsageError: a pattern matches nothing, or nothing is left to quantize.
    """
    _require_cache_place(recipe)
    if recipe.method == "none":
        return dict.fromkeys(shapes), _unread_caches(recipe)
    assigned = assign(list(shapes), recipe.scheme, recipe.ignore, recipe.overrides, ALWAYS_KEPT)
    schemes, fallbacks = _fit(recipe, shapes, {name: assigned[name] for name in shapes})
    if recipe.target is not None:
        schemes, bent = _fit_target(recipe, recipe.target, source, shapes, schemes)
        fallbacks += bent + _unread_caches(recipe)
    if not any(schemes.values()):
        raise UsageError("nothing is left to quantize", "loosen `--ignore`, or choose another `--group-size`")
    for name in recipe.format:
        FORMATS[name].config(schemes, fp8_cache=recipe.kv_cache is not None)  # where it can say so at all
    return schemes, fallbacks


def _fit_target(
    recipe: Recipe,
    target: str,
    source: Checkpoint,
    shapes: Mapping[str, tuple[int, int]],
    schemes: Mapping[str, Scheme | None],
) -> tuple[dict[str, Scheme | None], tuple[Fallback, ...]]:
    """Apply the policy for linears that the target engine would not load in one of the formats."""

    def refused(schemes: Mapping[str, Scheme | None]) -> dict[str, tuple[str, str]]:
        found: dict[str, tuple[str, str]] = {}
        for name in recipe.format:
            found |= refusals(shapes, schemes, name, target, tp=recipe.tp, config=source.config)
        return found

    fitted, lost, reasons = dict(schemes), refused(schemes), {}
    for size in SERVED_GROUPS if recipe.indivisible == "smaller-group" else ():
        trial = fitted | {name: _narrowed(fitted[name], size) for name in lost}
        still = refused(trial)
        for name in lost.keys() - still.keys():
            fitted[name] = trial[name]
            reasons[name] = f"group size {size}, because of {lost[name][0]}"
        lost = refused(fitted)
    while lost and recipe.indivisible != "fail":  # what is left of a layer's experts may be refused next
        fitted |= dict.fromkeys(lost)
        reasons |= {name: f"kept in 16 bit, because of {message}" for name, (message, _) in lost.items()}
        lost = refused(fitted)
    if lost or (any(schemes.values()) and not any(fitted.values())):
        _refuse_for(recipe, target, source, shapes, schemes)
    return fitted, tuple(Fallback(name, reasons[name]) for name in shapes if name in reasons)


def _narrowed(scheme: Scheme | None, size: int) -> Scheme | None:
    """The scheme in groups of `size`, where that is less than it has."""
    if scheme is None or 0 < scheme.group_size <= size:
        return scheme
    return replace(scheme, group_size=size)


def _refuse_for(
    recipe: Recipe,
    target: str,
    source: Checkpoint,
    shapes: Mapping[str, tuple[int, int]],
    schemes: Mapping[str, Scheme | None],
) -> None:
    """Raise UnsupportedScheme for the first format in which the target engine would not load the model."""
    for name in recipe.format:
        found = judge(shapes, schemes, name, target, tp=recipe.tp, config=source.config)
        if not found.loads:
            raise UnsupportedScheme(found.message, found.hint)


def _unread_caches(recipe: Recipe) -> tuple[Fallback, ...]:
    """Say of formats from which the target engine would not read the scales of the cache that it will not."""
    if recipe.target is None or recipe.kv_cache is None:
        return ()
    engine = ENGINES[recipe.target]
    return tuple(
        Fallback(f"kv_cache in {name}", engine.no_cache.text) for name in recipe.format if name not in engine.cache
    )


def _require_cache_place(recipe: Recipe) -> None:
    """Refuse a run that would leave nothing but the scales of a cache, in a format that has no place for them."""
    if recipe.method == "none":
        for name in recipe.format:
            if not FORMATS[name].cache_specs("attention"):
                held = ", ".join(other for other, fmt in FORMATS.items() if fmt.cache_specs("attention"))
                raise UsageError(f"`{name}` checkpoints hold no scales of a KV cache", f"choose `--format` from {held}")


def _fit(
    recipe: Recipe, shapes: Mapping[str, tuple[int, int]], schemes: Mapping[str, Scheme | None]
) -> tuple[dict[str, Scheme | None], tuple[Fallback, ...]]:
    """Apply the policy for linears that the format or the group size does not allow."""
    formats = [FORMATS[name] for name in recipe.format]
    fitted, fallbacks, refused = dict(schemes), [], {}
    for name, scheme in schemes.items():
        if scheme is None:
            continue
        try:
            for fmt in formats:
                fmt.check(scheme, shapes[name])
        except UnsupportedScheme as error:
            smaller = _smaller(formats, scheme, shapes[name]) if recipe.indivisible == "smaller-group" else None
            fitted[name] = smaller
            if recipe.indivisible == "fail":
                refused[name] = error
            elif smaller is not None:
                fallbacks.append(Fallback(name, f"group size {smaller.group_size} instead of {scheme.group_size}"))
            else:
                fallbacks.append(Fallback(name, f"kept in 16 bit: {error.message}"))
    if refused:
        _refuse(refused, shapes, schemes)
    return fitted, tuple(fallbacks)


def _smaller(formats: Sequence[Format], scheme: Scheme, shape: tuple[int, int]) -> Scheme | None:
    for size in legal_groups(shape[1]):
        if scheme.group_size == -1 or size <= scheme.group_size:
            candidate = replace(scheme, group_size=size)
            try:
                for fmt in formats:
                    fmt.check(candidate, shape)
            except UnsupportedScheme:
                continue
            return candidate
    return None


def _refuse(
    refused: Mapping[str, UnsupportedScheme],
    shapes: Mapping[str, tuple[int, int]],
    schemes: Mapping[str, Scheme | None],
) -> None:
    """Raise one error that names the kinds of linears that do not fit, and what would."""
    kinds: dict[str, list[str]] = {}
    for name in refused:
        kinds.setdefault(f"*.{name.rpartition('.')[2]}", []).append(name)
    listed = ", ".join(f"`{kind}` ({len(names)}, {shapes[names[0]][1]:,} inputs)" for kind, names in kinds.items())
    first = next(iter(refused.values()))
    message = f"{len(refused)} linears do not fit: {listed}: {first.message}"
    if all(scheme.fits(shapes[name][1]) for name in refused if (scheme := schemes[name])):
        raise UnsupportedScheme(message, first.hint)  # no group size would help
    common = set.intersection(*(set(legal_groups(shapes[name][1])) for name in refused))
    served = [str(size) for size in SERVED_GROUPS if size in common]
    others = [str(size) for size in (256, 192, 96, 48, 16) if size in common]
    if any(shapes[name][1] % 8 for name in refused):  # the codes in a word
        raise UnsupportedScheme(message, "use `--indivisible keep`, or leave them out with `--ignore`")
    sizes = ", ".join([*served, *others, "-1"])
    raise UnsupportedScheme(
        message,
        f"`--group-size` may be {sizes} (engines have kernels for {', '.join(map(str, SERVED_GROUPS))} and -1); or let "
        "`--indivisible smaller-group` or `--indivisible keep` decide, or leave them out with `--ignore`",
    )
