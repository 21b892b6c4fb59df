"""Scales in another dtype: what moves is counted, what would be lost is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from samples import random_weight

from quantkit.errors import UnsupportedScheme
from quantkit.formats.scales import Moved, cast_scale
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import Scheme


def weight(*scales: float, dtype: torch.dtype = torch.bfloat16) -> QuantizedWeight:
    """One row with a group of 8 for each scale."""
    q = random_weight(Scheme(4, 8), 1, 8 * len(scales))
    return replace(q, scale=torch.tensor([scales], dtype=dtype))


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_what_a_dtype_holds_stays(dtype: str) -> None:
    q = weight(0.5, 2.0**-14, 3.0 * 2**-24, 65280.0)  # the last is the largest that bfloat16 and float16 both hold

    found = cast_scale("x", q, dtype)

    assert found.scale.dtype == {"F16": torch.float16, "F32": torch.float32}[dtype]
    assert found.scale.tolist() == [[0.5, 2.0**-14, 3.0 * 2**-24, 65280.0]]
    assert torch.equal(found.codes, q.codes) and torch.equal(found.zero_point, q.zero_point)
    assert Moved().plus("x", q.scale, found.scale) == Moved(total=4)


def test_the_same_dtype_is_no_work() -> None:
    q = weight(0.5)

    assert cast_scale("x", q, "BF16") is q


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (2.0**-26, "F16", r"`a\.b` has a scale of 1\.49e-08, which is 0 as F16"),
        (65536.0, "F16", r"`a\.b` has a scale of 6\.55e\+04, which is inf as F16"),
        (float("inf"), "F16", r"`a\.b` has a scale of inf, which is inf as F16"),
        (float("nan"), "F32", r"`a\.b` has a scale of nan, which is nan as F32"),
    ],
)
def test_what_a_dtype_loses_is_refused(value: float, dtype: str, message: str) -> None:
    with pytest.raises(UnsupportedScheme, match=message) as refused:
        cast_scale("a.b", weight(0.5, value), dtype)

    assert "compressed-tensors" in refused.value.hint


def test_a_scale_of_zero_stays_one() -> None:
    assert cast_scale("x", weight(0.0), "F16").scale.tolist() == [[0.0]]


def test_moves_add_up_and_the_furthest_is_named() -> None:
    # bfloat16 keeps 8 bits: 1 + 2^-9 becomes 1, 1 + 3 * 2^-8 becomes 1 + 2^-6
    q = weight(1.0, 1 + 2.0**-9, 1 + 3 * 2.0**-8, dtype=torch.float32)
    other = weight(1.0, 2.0, dtype=torch.float32)
    near = weight(1 + 2.0**-20, dtype=torch.float32)

    found = Moved()
    for name, each in (("near", near), ("a", q), ("other", other)):
        found = found.plus(name, each.scale, cast_scale(name, each, "BF16").scale)

    furthest = 2.0**-8 / (1 + 3 * 2.0**-8)
    assert (found.total, found.moved, found.where) == (6, 3, "a") and found.largest == pytest.approx(furthest)
    assert found.line() == "3 of 6 scales moved, the furthest by 0.39% in a"
    assert found.to_json() == {"total": 6, "moved": 3, "largest": found.largest, "where": "a"}
    assert Moved().plus("near", near.scale, cast_scale("near", near, "BF16").scale).line() == (
        "1 of 1 scales moved, the furthest by less than 0.01% in near"
    )
    assert Moved(total=1234).line() == "1,234 scales, all stored as they were"
