"""Checks that read every tensor once, one at a time: what is packed, and what is the source's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quantkit.checkpoint.reader import check_finite
from quantkit.errors import CheckpointError
from quantkit.events import Emit, Stage
from quantkit.formats.kv_cache import cache_scale_owner
from quantkit.ops.affine import dequantize
from quantkit.qweight import QuantizedWeight
from quantkit.verify.subject import Subject, relative_error
from quantkit.verify.verdict import Check

# numerics: rounding to 4 bits was seen to move a weight by 0.16 of its norm at most, methods that compensate errors by
# 0.20; the codes of another tensor or other rows are off by 1 and more
FAR = 0.5
_ZERO_PARTS = ("weight_zero_point", "qzeros")
_AGAIN = "the artifact is damaged: copy it again, or quantize again"
_WRONG_SOURCE = "it is not the source of this artifact, or the artifact is damaged: quantize again"


def look_at_content(subject: Subject, readable: set[str], checks: Mapping[str, Check], emit: Emit) -> None:
    """Read every packed linear, and every tensor that the source has, too.

    Args:
        readable: packed linears whose tensors have the shapes and dtypes that their scheme gives them.
    """
    names = list(subject.source.tensors)
    for index, name in enumerate(names):
        emit(Stage(index, len(names), name))
        linear = name.removesuffix(".weight")
        weight = _look_at_linear(subject, linear, checks) if linear in readable else None
        if subject.reference is not None and name in subject.reference.tensors:
            _compare(subject, name, weight, checks)
    if subject.reference is None:
        for check in ("weights", "untouched", "accounted"):
            checks[check].note = "no source given: pass `--against`"
    else:
        _look_at_account(subject, checks["accounted"])
    zeros = checks["zero-points"]
    if not zeros.looked and not zeros.failures:
        zeros.note = "symmetric: none is stored" if readable else ""


def _look_at_linear(subject: Subject, linear: str, checks: Mapping[str, Check]) -> QuantizedWeight | None:
    """Unpack a linear and check its codes, scales and zero points; None where it cannot be unpacked."""
    layout, _ = subject.parts(linear)
    has_zeros = any(name.endswith(_ZERO_PARTS) for name in layout)
    checks["codes"].looked += 1
    try:
        q = subject.source.quantized(linear)
    except CheckpointError as error:
        wrong_zero = any(f"{linear}.{part}`" in error.message for part in _ZERO_PARTS)
        checks["zero-points" if wrong_zero else "codes"].fail(linear, error.message, error.hint or _AGAIN)
        return None
    if q.g_idx is not None and subject.source.config.get("desc_act") is False:
        # engines read `g_idx` only where the config says so, and would scale these inputs by another group's scale
        checks["codes"].fail(
            linear, "has groups that are not consecutive, and the config says `desc_act: false`", _AGAIN
        )
        return None
    wanted = subject.shapes[f"{linear}.weight"]
    if tuple(q.codes.shape) != wanted:
        checks["codes"].fail(linear, f"unpacks to {list(q.codes.shape)}, and the model has {list(wanted)}", _AGAIN)
        return None
    if has_zeros:
        checks["zero-points"].looked += q.zero_point.numel()
        if outside := int((q.zero_point > q.scheme.qmax).sum()):
            checks["zero-points"].fail(linear, f"has {outside:,} zero points above {q.scheme.qmax}", _AGAIN)
    checks["scales"].looked += q.scale.numel()
    if bad := int((~(torch.isfinite(q.scale) & (q.scale > 0))).sum()):
        worst = q.scale[~(torch.isfinite(q.scale) & (q.scale > 0))][0].item()
        problem = f"has {bad:,} of {q.scale.numel():,} scales that are not finite and positive, such as {worst}"
        checks["scales"].fail(linear, problem, _AGAIN)
        return None
    if rows := _constant_rows(q):
        problem = f"holds one code only in {rows:,} of {q.codes.shape[0]:,} rows, whose scales are not tiny"
        checks["codes"].fail(linear, problem, _AGAIN)
    return q


def _constant_rows(q: QuantizedWeight) -> int:
    """Rows of one code, as holes in a file leave them; rows of zeros count only where the whole weight is zero.

    A source's rows of zeros have the code of zero, or the smallest scale; those of a whole weight the latter.
    """
    low, high = torch.aminmax(q.codes, dim=1)
    tiny = 2 * torch.finfo(q.scale.dtype).tiny
    constant = (low == high) & (q.scale.float().amax(1) > tiny)
    zero = (q.zero_point == low[:, None]).all(1)
    return int(constant.sum()) if bool((constant & zero).all()) else int((constant & ~zero).sum())


def _compare(subject: Subject, name: str, q: QuantizedWeight | None, checks: Mapping[str, Check]) -> None:
    """Compare one tensor with the source's: packed ones by distance, others byte for byte."""
    assert subject.reference is not None
    mine, theirs = subject.source.tensors[name], subject.reference.tensors[name]
    if mine is None or theirs is None:
        if q is not None or mine is not None:
            weight = dequantize(q) if q is not None else subject.source.read([name], torch.float32)[name]
            _look_at_distance(subject, name, weight, checks["weights"])
        return
    check = checks["untouched"]
    check.looked += 1
    if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
        was = f"{theirs.dtype} {list(theirs.shape)}"
        check.fail(name, f"is {mine.dtype} {list(mine.shape)}, and the source has {was}", _WRONG_SOURCE)
        return
    chunks = zip(subject.source.checkpoint.raw_chunks(name), subject.reference.checkpoint.raw_chunks(name), strict=True)
    if all(left == right for left, right in chunks):
        return
    if name not in subject.rewritten:
        check.fail(name, "differs from the source, and no fold on record changed it", _WRONG_SOURCE)
        return
    try:
        check_finite(name, subject.source.checkpoint.read([name])[name])
    except CheckpointError as error:
        check.fail(name, error.message.removeprefix(f"`{name}` "), _AGAIN)
    before = int(check.note.partition(" ")[0] or 0)
    check.note = f"{before + 1} rewritten by folds on record"


def _look_at_distance(subject: Subject, name: str, weight: Tensor, check: Check) -> None:
    """Check that a weight, dequantized, is close to the source's.

    A fold multiplies columns, and divides rows, by positive numbers. Where one is on record, the factors that bring the
    source closest are taken out first: what stays is the error of rounding, or all of it where the weight is another.
    """
    assert subject.reference is not None
    check.looked += 1
    wanted = subject.reference.read([name], torch.float32)[name]
    if wanted.shape != weight.shape:
        check.fail(name, f"is {list(weight.shape)}, and the source has {list(wanted.shape)}", _WRONG_SOURCE)
        return
    error = relative_error(weight, wanted)
    if not error <= FAR and name.removesuffix(".weight") in subject.rescaled:
        error = relative_error(weight, _aligned(wanted, weight))
    if not error <= FAR:
        check.fail(name, f"differs from the source by {error:.0%} of its norm", _WRONG_SOURCE)


def _aligned(wanted: Tensor, weight: Tensor) -> Tensor:
    """`wanted` with its columns and rows multiplied by the positive factors that bring it closest to `weight`."""
    floor = torch.finfo(torch.float32).tiny
    for _ in range(3):  # each dimension in turn, least squares given the other; it settles at once
        for dim in (0, 1):
            over = (wanted * weight).sum(dim, keepdim=True)
            wanted = wanted * (over / wanted.square().sum(dim, keepdim=True).clamp(min=floor)).clamp(min=0)
    return wanted


def _look_at_account(subject: Subject, check: Check) -> None:
    """Check that every tensor of the source is there, and none that it lacks."""
    assert subject.reference is not None
    mine, theirs = subject.source.tensors, subject.reference.tensors
    check.looked = len(theirs)
    for name in theirs.keys() - mine.keys():
        if cache_scale_owner(name) is None:
            check.fail(name, "of the source is missing", _WRONG_SOURCE)
    for name in mine.keys() - theirs.keys():
        if cache_scale_owner(name) is None:
            check.fail(name, "is not in the source", _WRONG_SOURCE)
