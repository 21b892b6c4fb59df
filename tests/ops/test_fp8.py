"""e4m3 against a table of its numbers made from the definition, and against torch's own cast."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.ops.fp8 import E4M3_MAX, fake_e4m3

# sign aside: exponent field 0 is subnormal, in steps of 2**-9; else 2**(e - 7) * (1 + m / 8); e = 15, m = 7 is nan
FINITE = sorted(
    m * 2.0**-9 if e == 0 else 2.0 ** (e - 7) * (1 + m / 8) for e in range(16) for m in range(8) if (e, m) != (15, 7)
)
SCALES = st.floats(2.0**-20, 2.0**20)
NUMBERS = st.floats(-1e4, 1e4, width=32)


def one(x: float, scale: float) -> float:
    return float(fake_e4m3(torch.tensor(x), scale))


def test_the_largest_number_is_448() -> None:
    assert E4M3_MAX == FINITE[-1] == 448.0 and len(FINITE) == 127


@pytest.mark.parametrize("scale", [1.0, 0.25, 2.0**-8, 64.0])
def test_every_number_of_the_format_comes_back(scale: float) -> None:
    numbers = torch.tensor([*FINITE, *(-x for x in FINITE)]) * scale

    assert torch.equal(fake_e4m3(numbers, scale), numbers)


@settings(deadline=None)
@given(NUMBERS, SCALES)
def test_it_is_the_nearest_number_of_the_format(x: float, scale: float) -> None:
    scaled = float(torch.tensor(x) / scale)
    nearest = min(abs(abs(scaled) - number) for number in FINITE)

    stored = one(x, scale) / scale

    assert abs(stored - scaled) <= nearest * (1 + 1e-5) + abs(scaled) * 1e-6
    assert stored == 0 or math.copysign(1, stored) == math.copysign(1, x)


@settings(deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=20), SCALES)
def test_a_second_time_changes_nothing_and_signs_do_not_matter(numbers: list[float], scale: float) -> None:
    x = torch.tensor(numbers)

    once = fake_e4m3(x, scale)

    torch.testing.assert_close(fake_e4m3(once, scale), once, rtol=1e-6, atol=0)
    assert torch.equal(fake_e4m3(-x, scale), -once)
    assert float(once.abs().max()) <= 448 * scale * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_torchs_cast_within_the_range(dtype: torch.dtype) -> None:
    x = (torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 60).to(dtype)
    assert float(x.abs().max()) < 448

    found = fake_e4m3(x, 0.5)

    assert found.dtype == dtype
    expected = ((x.float() * 2).clamp(-448, 448).to(torch.float8_e4m3fn).float() / 2).to(dtype)
    assert torch.equal(found, expected)
    assert torch.equal(fake_e4m3(x, 1.0), x.to(torch.float8_e4m3fn).to(dtype))


@pytest.mark.parametrize(("x", "stored"), [(449.0, 448.0), (1e30, 448.0), (math.inf, 448.0), (-500.0, -448.0)])
def test_what_is_beyond_the_range_saturates(x: float, stored: float) -> None:
    assert one(x, 1.0) == stored
    assert one(x, 1e-3) == pytest.approx(stored * 1e-3)


def test_nan_stays_nan() -> None:
    assert math.isnan(one(math.nan, 1.0))


def test_halfway_goes_to_the_even_one() -> None:
    def stored(*numbers: float) -> Tensor:
        return fake_e4m3(torch.tensor(numbers), 1.0)

    assert stored(17.0, 19.0, 2.0**-10, 3 * 2.0**-10).tolist() == [16.0, 20.0, 0.0, 2.0**-8]
