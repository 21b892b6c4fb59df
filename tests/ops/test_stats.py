"""Second moments: the same however the tokens arrive, exact against float64, and scaled in closed form."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantkit.ops.linalg import output_error
from quantkit.ops.stats import InputStats


def inputs(tokens: int, features: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, features, generator=generator) * torch.randn(features, generator=generator).exp()


def stats_of(*chunks: Tensor) -> InputStats:
    stats = InputStats.empty(chunks[0].shape[-1])
    for chunk in chunks:
        stats.add(chunk)
    return stats.finish()


def require_equal(left: InputStats, right: InputStats, rtol: float = 1e-5) -> None:
    assert left.count == right.count
    size = float(right.hessian.abs().max())
    torch.testing.assert_close(left.hessian, right.hessian, rtol=rtol, atol=rtol * size)
    torch.testing.assert_close(left.abs_sum, right.abs_sum, rtol=rtol, atol=rtol * float(right.abs_sum.max()))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.sampled_from([1, 5, 24]), st.lists(st.integers(0, 40), max_size=4), st.integers(0, 99))
def test_any_split_of_the_tokens_gives_the_same(tokens: int, features: int, cuts: list[int], seed: int) -> None:
    x = inputs(tokens, features, seed)
    edges = [0, *sorted(min(cut, tokens) for cut in cuts), tokens]
    chunks = [x[a:b] for a, b in itertools.pairwise(edges) if b > a]

    require_equal(stats_of(*chunks), stats_of(x))


@pytest.mark.parametrize("features", [8, 255, 256, 257, 300, 700])  # around and over the panels of the product
def test_they_are_exact_against_float64(features: int) -> None:
    x = inputs(64, features)

    stats = stats_of(x[:10], x[10:])

    exact = x.double().T @ x.double()
    torch.testing.assert_close(stats.hessian.double(), exact, rtol=1e-5, atol=1e-6 * float(exact.abs().max()))
    assert torch.equal(stats.hessian, stats.hessian.T)
    assert torch.equal(stats.importance, stats.hessian.diagonal())
    torch.testing.assert_close(stats.abs_mean.double(), x.double().abs().mean(0), rtol=1e-5, atol=0)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 30), st.sampled_from([1, 7, 32]), st.integers(0, 99))
def test_those_of_scaled_inputs_are_scaled_statistics(tokens: int, features: int, seed: int) -> None:
    x = inputs(tokens, features, seed)
    s = torch.randn(features, generator=torch.Generator().manual_seed(seed)).exp()
    stats = stats_of(x)
    before = stats.hessian.clone(), stats.abs_sum.clone()

    scaled = stats.rescaled(s)

    torch.testing.assert_close(scaled.hessian, stats_of(x / s).hessian, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scaled.abs_sum, stats_of(x / s).abs_sum, rtol=1e-5, atol=1e-6)
    assert scaled.count == stats.count == tokens
    assert torch.equal(stats.hessian, before[0]) and torch.equal(stats.abs_sum, before[1])


@pytest.mark.parametrize("shape", [(1, 6), (6,), (1, 1, 6), (2, 3, 6)])
def test_tokens_are_counted_by_rows_whatever_the_shape(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    stats = stats_of(x)

    rows = x.reshape(-1, 6)
    assert stats.count == len(rows)
    torch.testing.assert_close(stats.hessian, rows.T @ rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_inputs_are_summed_in_float32(dtype: torch.dtype) -> None:
    x = inputs(4096, 8).abs().to(dtype)

    stats = stats_of(*x.split(1))

    exact = x.double().T @ x.double()
    assert stats.hessian.dtype == torch.float32
    torch.testing.assert_close(stats.hessian.double(), exact, rtol=1e-4, atol=0)


def test_float16_inputs_may_square_beyond_float16() -> None:
    stats = stats_of(torch.full((3, 2), 60000.0).half())

    assert torch.isfinite(stats.hessian).all()
    assert stats.abs_mean.tolist() == pytest.approx([60000.0, 60000.0], rel=1e-3)


def test_no_tokens_are_no_trouble() -> None:
    stats = InputStats.empty(4).finish()

    assert stats.count == 0 and not stats.abs_mean.any() and not stats.hessian.any()


def test_the_output_error_is_that_of_the_outputs() -> None:
    x, e = inputs(50, 12), inputs(3, 12, seed=1)

    error = output_error(e, stats_of(x).hessian)

    torch.testing.assert_close(error, (x @ e.T).square().sum(0), rtol=1e-4, atol=0)
