"""The grid: scales a file can hold, codes in range, errors of at most half a step, zero where zero was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.methods.rtn import rtn_round
from quantkit.ops.affine import SHRINK, dequantize, search_qparams, store_scale
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import Scheme

DTYPES = (torch.float16, torch.bfloat16)
MIN_MAX = (1.0,)
FEW = SHRINK[::5]
schemes = st.builds(
    Scheme, bits=st.sampled_from([4, 8]), group_size=st.sampled_from([8, 16, -1]), symmetric=st.booleans()
)


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """float32 [N, K], K a multiple of 16: rows of very different sizes, some one-sided, some with zeros."""
    rows, columns = draw(st.integers(1, 5)), 16 * draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    w = torch.randn(rows, columns, generator=generator)
    kind = draw(st.sampled_from(["normal", "positive", "negative", "sparse", "outliers", "equal"]))
    if kind == "positive":
        w = w.abs() + 3
    elif kind == "negative":
        w = -w.abs() - 3
    elif kind == "sparse":
        w = torch.where(torch.rand(rows, columns, generator=generator) < 0.8, 0.0, w)
    elif kind == "outliers":
        w = w * torch.randn(rows, columns, generator=generator).mul(2).exp()
    elif kind == "equal":
        w = torch.full_like(w, float(w[0, 0]))
    return w * 10.0 ** draw(st.integers(-3, 3))


def by_group(values: Tensor | np.ndarray, q: QuantizedWeight) -> np.ndarray:
    """Values [N, G] repeated over the features of each group, float64 [N, K]."""
    array = np.asarray(values, dtype=np.float64)
    return array.repeat(q.codes.shape[1] // array.shape[1], axis=1)


def parts(q: QuantizedWeight) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and zero points, float64 [N, K]."""
    return q.codes.numpy().astype(np.float64), by_group(q.scale.double(), q), by_group(q.zero_point, q)


@settings(deadline=None, max_examples=40)
@given(weights(), schemes, st.sampled_from(DTYPES), st.booleans())
def test_codes_are_the_nearest_of_a_grid_that_can_be_stored(
    w: Tensor, scheme: Scheme, dtype: torch.dtype, searched: bool
) -> None:
    q = rtn_round(w, None, scheme, dtype, SHRINK if searched else MIN_MAX)

    codes, scale, zero = parts(q)
    assert q.codes.dtype == q.zero_point.dtype == torch.uint8 and q.scale.dtype == dtype
    assert q.scale.shape == q.zero_point.shape == (len(w), w.shape[1] // scheme.group(w.shape[1]))
    assert codes.max() <= scheme.qmax and zero.max() <= scheme.qmax
    assert np.isfinite(scale).all() and (scale > 0).all()
    if scheme.symmetric:
        assert (zero == scheme.midpoint).all()
    # inside the range every error is at most half a step; outside it the code is the end of the range
    values = w.double().numpy()
    low, high = -zero * scale, (scheme.qmax - zero) * scale
    error = np.abs((codes - zero) * scale - values)
    inside = (values >= low) & (values <= high)
    assert (error[inside] <= scale[inside] * 0.5 * (1 + 1e-5)).all()
    assert (codes[values > high] == scheme.qmax).all() and (codes[values < low] == 0).all()
    assert ((low <= 0) & (high >= 0)).all()


@settings(deadline=None, max_examples=40)
@given(weights(), schemes, st.sampled_from(DTYPES))
def test_unclipped_ranges_reach_over_every_weight(w: Tensor, scheme: Scheme, dtype: torch.dtype) -> None:
    q = rtn_round(w, None, scheme, dtype, MIN_MAX)

    codes, scale, zero = parts(q)
    error = np.abs((codes - zero) * scale - w.double().numpy())
    rounding = torch.finfo(dtype).eps * scheme.qmax  # of the stored scale, at the end of the range
    assert (error <= scale * (1 + rounding)).all()


@settings(deadline=None, max_examples=40)
@given(weights(), schemes, st.sampled_from(DTYPES))
def test_dequantized_is_code_minus_zero_times_scale(w: Tensor, scheme: Scheme, dtype: torch.dtype) -> None:
    q = rtn_round(w, None, scheme, dtype)

    codes, scale, zero = parts(q)
    exact = (codes - zero).astype(np.float32) * scale.astype(np.float32)
    assert np.array_equal(dequantize(q).numpy(), exact)
    assert torch.equal(dequantize(q, dtype), torch.from_numpy(exact).to(dtype))


@settings(deadline=None, max_examples=15)
@given(weights(), schemes, st.integers(0, 99))
def test_the_search_finds_the_best_of_its_factors(w: Tensor, scheme: Scheme, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    columns = w.shape[1]
    x = torch.randn(3 * columns, columns, generator=generator) * torch.randn(columns, generator=generator).exp()
    hessian = x.T @ x

    def losses(q: QuantizedWeight, moments: Tensor) -> Tensor:  # [N, G]
        e = (dequantize(q) - w).double()
        group = columns // q.scale.shape[1]
        if moments.dim() == 1:
            return (e.square() * (moments + 1e-4 * moments.mean())).unflatten(1, (-1, group)).sum(-1)
        blocks = torch.stack([moments[k : k + group, k : k + group] for k in range(0, columns, group)]).double()
        blocks.diagonal(dim1=1, dim2=2).add_(1e-4 * moments.diagonal().mean())
        e = e.unflatten(1, (-1, group))
        return torch.einsum("ngi,gij,ngj->ng", e, blocks, e)

    for moments in (hessian, hessian.diagonal().contiguous()):
        best = losses(rtn_round(w, moments, scheme, torch.float16, FEW), moments)
        single = torch.stack([losses(rtn_round(w, moments, scheme, torch.float16, (f,)), moments) for f in FEW])
        lowest = single.min(0).values
        assert (best <= lowest * (1 + 1e-3) + 1e-6 * single.max()).all()


@settings(deadline=None, max_examples=40)
@given(weights(), schemes, st.data())
def test_rows_are_independent(w: Tensor, scheme: Scheme, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(w) - 1))

    together = rtn_round(w, None, scheme, torch.bfloat16)
    alone = rtn_round(w[row : row + 1], None, scheme, torch.bfloat16)

    assert torch.equal(together.codes[row], alone.codes[0]) and torch.equal(together.scale[row], alone.scale[0])


def test_rows_are_independent_across_the_slices_of_a_large_weight() -> None:
    w = torch.randn(700, 512, generator=torch.Generator().manual_seed(0))  # three slices

    scale, zero = search_qparams(w, None, Scheme(4, 64, False), torch.float16, FEW)

    for part in (slice(0, 1), slice(255, 258), slice(699, 700)):
        alone = search_qparams(w[part], None, Scheme(4, 64, False), torch.float16, FEW)
        assert torch.equal(scale[part], alone[0]) and torch.equal(zero[part], alone[1])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("searched", [False, True])
def test_one_sided_weights_keep_zero_in_their_range(sign: int, searched: bool) -> None:
    w = sign * torch.linspace(10.5, 14.0, 32)[None]

    q = rtn_round(w, None, Scheme(4, 32, False), torch.float16, SHRINK if searched else MIN_MAX)

    assert (dequantize(q) - w).abs().max() <= q.scale.float().max() <= 1.0
    assert q.zero_point.item() == (0 if sign > 0 else 15)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_zeros_stay_zeros(dtype: torch.dtype, symmetric: bool) -> None:
    w = torch.zeros(2, 32)
    w[1, 16:] = torch.linspace(-1, 1, 16)

    q = rtn_round(w, torch.ones(32), Scheme(4, 16, symmetric), dtype)

    assert (dequantize(q)[0] == 0).all() and (dequantize(q)[1, :16] == 0).all()
    assert torch.isfinite(q.scale).all() and (q.scale > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-30, 1e-9, 1e-6, 3e4, 6e4])
@pytest.mark.parametrize("symmetric", [False, True])
def test_tiny_and_huge_groups_stay_finite(dtype: torch.dtype, size: float, symmetric: bool) -> None:
    w = torch.linspace(-1, 1, 32)[None] * size

    q = rtn_round(w, None, Scheme(4, 32, symmetric), dtype)

    assert torch.isfinite(q.scale).all() and (q.scale >= torch.finfo(dtype).tiny).all()
    assert (dequantize(q) - w).abs().max() <= max(q.scale.float().max() * 0.6, size)
    if size > 1:
        assert (dequantize(q) - w).abs().max() <= size / 7


def test_a_bfloat16_group_beyond_float16_is_exact_to_a_step() -> None:
    w = torch.linspace(-1e6, 1e6, 32)[None]

    q = rtn_round(w, None, Scheme(4, 32), torch.bfloat16)

    assert (dequantize(q) - w).abs().max() <= q.scale.float().max()


def test_scales_are_kept_inside_the_normal_range_of_their_dtype() -> None:
    scale = torch.tensor([0.0, 1e-30, 1.0, 1e30])

    for dtype in DTYPES:
        kept = store_scale(scale, dtype)
        assert torch.equal(kept.to(dtype).float(), kept)
        assert kept[0] == torch.finfo(dtype).tiny and torch.isfinite(kept.to(dtype)).all()


def test_channels_that_no_token_reached_count_as_equals() -> None:
    w = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))

    nothing = search_qparams(w, torch.zeros(32, 32), Scheme(4, 16), torch.float16)
    equal = search_qparams(w, None, Scheme(4, 16), torch.float16)

    assert torch.equal(nothing[0], equal[0])


def test_an_index_of_groups_is_read() -> None:
    q = QuantizedWeight(
        codes=torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8),
        scale=torch.tensor([[0.5, 2.0]]).half(),
        zero_point=torch.tensor([[1, 0]], dtype=torch.uint8),
        scheme=Scheme(4, 2, False),
        g_idx=torch.tensor([0, 1, 0, 1], dtype=torch.int32),
    )

    assert dequantize(q).tolist() == [[0.0, 4.0, 1.0, 8.0]]
