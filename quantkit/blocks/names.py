"""Between the names of a model's parameters and the names of a checkpoint's tensors. Pure functions over strings."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def match_names(wanted: Iterable[str], available: Collection[str], base_prefix: str) -> dict[str, str]:
    """Find the checkpoint tensor of each parameter.

    A checkpoint may have been saved from the bare base model (no `base_prefix`), or from a larger model that holds this
    one under a further prefix (`language_model.`). One such change of prefix is found and applied to all names, never a
    different one per tensor.

    Args:
        wanted: parameter names of the model.
        available: tensor names of the checkpoint.
        base_prefix: the attribute that holds the base model, e.g. "model".

    Returns:
        {parameter: tensor} for the parameters that were found, by the change of prefix that finds most.
    """
    names = list(wanted)
    stored = set(available)
    found = (
        (
            {name: stored_name for name in names if (stored_name := change(name)) in stored}
            for change in _changes(names, stored, base_prefix)
        )
        if names
        else ()
    )
    return max(found, key=len, default={})


def _changes(names: list[str], stored: set[str], base_prefix: str):  # type: ignore[no-untyped-def]
    dotted = f"{base_prefix}."
    yield lambda name: name
    yield lambda name: name.removeprefix(dotted)
    yield lambda name: dotted + name
    # the longest parameter name is the least ambiguous one to look for under a foreign prefix
    probe = max(names, key=len)
    for tail in (probe, probe.removeprefix(dotted)):
        for prefix in sorted({name.removesuffix(tail) for name in stored if name.endswith("." + tail)}):
            cut = dotted if tail != probe else ""
            yield lambda name, prefix=prefix, cut=cut: prefix + name.removeprefix(cut)
