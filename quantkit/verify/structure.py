"""Checks of names, shapes and dtypes, which need the headers and the model, and no weight."""

from __future__ import annotations

import re
from collections.abc import Iterator

from quantkit.checkpoint.header import TensorInfo
from quantkit.formats import FORMATS
from quantkit.formats.kv_cache import cache_scale_owner
from quantkit.scheme import Scheme
from quantkit.verify.subject import Subject, is_scheme_sized
from quantkit.verify.verdict import Check

FLOATS = ("F16", "BF16", "F32", "F64")
# linears of one parent that engines compute as one: vLLM, SGLang, TGI and TensorRT-LLM by their model code
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.")
_AGAIN = "the artifact is damaged: copy it again, or quantize again"
_OTHER_MODEL = "config.json or `quantization_config` may belong to another model"


def look_at_names(subject: Subject, check: Check) -> None:
    """Check that no tensor of a packed linear is missing or too much, and no weight is there that the model ignores."""
    source, stored = subject.source, subject.source.checkpoint.tensors
    check.looked = len(stored)
    for linear in _known(subject):
        layout, surplus = subject.parts(linear)
        for name in layout.keys() - stored.keys():
            check.fail(name, "is missing", _AGAIN)
        for name in surplus:
            check.fail(name, f"has no place in `{linear}`, which is {source.schemes[linear]}", _AGAIN)
    for name, info in source.tensors.items():
        if name not in subject.shapes and _ignored_weight(subject, name, info):
            check.fail(name, "is a weight that the model of config.json does not have", _OTHER_MODEL)


def _ignored_weight(subject: Subject, name: str, info: TensorInfo | None) -> bool:
    """Whether a tensor that nothing asks for looks like a weight of the model.

    Parts of a larger model (a vision tower), buffers and second copies of tied weights do not; nor does anything that
    the source has under this name, too.
    """
    if cache_scale_owner(name) is not None:
        return False
    if subject.reference is not None and info is not None:
        there = subject.reference.tensors.get(name)
        if there is not None and (there.dtype, there.shape) == (info.dtype, info.shape):
            return False
    owner, _, leaf = name.rpartition(".")
    model = subject.skeleton.model
    expected = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    if name in model.state_dict() or any(re.search(pattern, name) for pattern in expected):
        return False
    packed_parts = {suffix for fmt in FORMATS.values() for suffix in fmt.suffixes}
    if info is None or leaf in packed_parts - {"weight"}:
        return True
    tensors = subject.skeleton.blocks[0].tensors
    inside = {re.split(r"\.\d+\.", tensor)[0] for tensor in tensors.values()}
    owners = {tensor.rpartition(".")[0] for tensor in subject.shapes}
    is_weight = leaf == "weight" or (leaf == "bias" and len(info.shape) == 1)
    return is_weight and (owner in owners or any(name.startswith(f"{prefix}.") for prefix in inside))


def look_at_packed(subject: Subject, caches: int, check: Check) -> None:
    """Check that what `quantization_config` says is packed is, and that something is.

    Args:
        caches: scales of a KV cache in the artifact; an artifact may hold nothing else.
    """
    source = subject.source
    if source.format is None:
        check.note = "config.json has no quantization_config"
        return
    scheme_of = source.format.scheme_of(source.checkpoint.config["quantization_config"])
    linears = subject.linears()
    check.looked = len(linears)
    for name, scheme in linears.items():
        if scheme is None and (said := scheme_of(name)) is not None:
            check.fail(name, f"is not packed, and `quantization_config` says {said}", _AGAIN)
    for name in source.schemes.keys() - linears.keys():
        if f"{name}.weight" in subject.shapes:  # others are nothing that the model has: `names` tells
            check.fail(name, "is packed, and the model does not use it as a linear", _OTHER_MODEL)
    if not source.schemes and not caches and not check.failures:
        check.fail(
            "config.json", "has a `quantization_config`, and no linear is packed", "the run did nothing: quantize again"
        )


def look_at_shapes(subject: Subject, shapes: Check, dtypes: Check) -> set[str]:
    """Check every tensor's shape and dtype.

    Returns:
        The packed linears that are laid out right, whose content can be read.
    """
    source, stored = subject.source, subject.source.checkpoint.tensors
    for name, info in source.tensors.items():
        if info is None or name not in subject.shapes:
            continue
        shapes.looked += 1
        dtypes.looked += 1
        if info.shape != subject.shapes[name]:
            there = list(subject.shapes[name])
            shapes.fail(name, f"is {list(info.shape)}, and the model has {there}", _OTHER_MODEL)
        if info.dtype not in FLOATS:
            dtypes.fail(name, f"is {info.dtype}, and the model has floating-point numbers there", _AGAIN)
    right: set[str] = set()
    for linear in _known(subject):
        layout, surplus = subject.parts(linear)
        before = len(shapes.failures) + len(dtypes.failures)
        for name in layout.keys() & stored.keys():
            shapes.looked += 1
            dtypes.looked += 1
            (dtype, shape), info = layout[name], stored[name]
            if info.shape != shape:
                shapes.fail(name, f"is {list(info.shape)}, and the scheme asks for {list(shape)}", _OTHER_MODEL)
            if info.dtype != dtype:
                dtypes.fail(name, f"is {info.dtype}, and the format has {dtype}", _AGAIN)
        whole = layout.keys() <= stored.keys() and not surplus
        if whole and len(shapes.failures) + len(dtypes.failures) == before:
            right.add(linear)
    for linear, scheme in source.schemes.items():
        wanted = subject.shapes.get(f"{linear}.weight")
        if wanted is not None and not is_scheme_sized(wanted, scheme):
            shapes.fail(linear, f"is {list(wanted)} in the model, which {scheme} does not divide", _OTHER_MODEL)
    return right


def look_at_siblings(subject: Subject, check: Check) -> None:
    """Check that linears which engines fuse, and the experts of a layer, have one scheme or are all kept."""
    if subject.source.format is None:
        check.note = "nothing is packed"
        return
    linears = subject.linears()
    for group in fused(list(linears)):
        check.looked += 1
        schemes = {name: linears[name] for name in group}
        if len(set(schemes.values())) > 1:
            said = "; ".join(f"{name.rpartition('.')[2]} {scheme or 'kept'}" for name, scheme in _distinct(schemes))
            owner = group[0].rpartition(".")[0]
            check.fail(
                owner,
                f"engines fuse its linears, and their schemes differ: {said}",
                "quantize again with one scheme for all of them, or leave all out with `--ignore`",
            )


def fused(linears: list[str]) -> Iterator[list[str]]:
    """Groups, of two or more, of linears that must have one scheme."""
    groups: dict[tuple[str, int], list[str]] = {}
    for name in linears:
        owner, _, leaf = name.rpartition(".")
        for number, leaves in enumerate(FUSED):
            if leaf in leaves:
                groups.setdefault((owner, number), []).append(name)
        if expert := _EXPERT.match(name):
            groups.setdefault((expert[1], -1), []).append(name)
    yield from (group for group in groups.values() if len(group) > 1)


def _distinct(schemes: dict[str, Scheme | None]) -> list[tuple[str, Scheme | None]]:
    """The first linear of each scheme."""
    first: dict[Scheme | None, str] = {}
    for name, scheme in schemes.items():
        first.setdefault(scheme, name)
    return [(name, scheme) for scheme, name in first.items()]


def _known(subject: Subject) -> Iterator[str]:
    """Packed linears whose weight the model has, in a shape that their scheme divides."""
    for linear, scheme in subject.source.schemes.items():
        shape = subject.shapes.get(f"{linear}.weight")
        if shape is not None and is_scheme_sized(shape, scheme):
            yield linear
