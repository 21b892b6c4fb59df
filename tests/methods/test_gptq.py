"""GPTQ against rounding to nearest, against itself in other block sizes, and against the textbook in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quantkit.errors import NumericalError
from quantkit.methods import METHODS
from quantkit.methods.gptq import DAMP
from quantkit.methods.rtn import rtn_round
from quantkit.ops.linalg import damped_cholesky
from quantkit.ops.stats import InputStats
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import Scheme

from .inputs import (
    SCHEMES,
    correlated,
    dequantize,
    output_error,
    require_sound,
    rows_that_differ,
    solve,
    stats_of,
    weight,
)

FP16, BF16 = torch.float16, torch.bfloat16
GPTQ = METHODS["gptq"]


def textbook(w: Tensor, hessian: Tensor, grid: QuantizedWeight, damp: float) -> np.ndarray:
    """Codes [N, K] by Algorithm 1 of the paper: columns one by one, with the upper Cholesky factor of the inverse.

    In float64, on the grid of `grid`, by decreasing diagonal.
    """
    h = hessian.double().numpy().copy()
    h += damp * h.diagonal().mean() * np.eye(len(h))
    order = np.argsort(-hessian.diagonal().double().numpy(), kind="stable")
    factor = np.linalg.cholesky(np.linalg.inv(h[order][:, order])).T
    rest = w.double().numpy()[:, order].copy()
    group = w.shape[1] // grid.scale.shape[1]
    codes = np.zeros(w.shape, dtype=np.int64)
    for i, column in enumerate(order):
        scale = grid.scale.double().numpy()[:, column // group]
        zero = grid.zero_point.numpy()[:, column // group].astype(np.int64)
        codes[:, column] = np.clip(np.round(rest[:, i] / scale) + zero, 0, grid.scheme.qmax)
        error = (rest[:, i] - (codes[:, column] - zero) * scale) / factor[i, i]
        rest[:, i:] -= np.outer(error, factor[i, i:])
    return codes


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("importance", ["equal", "uneven"])
def test_without_correlation_it_is_rounding_to_nearest(scheme: Scheme, importance: str) -> None:
    w = weight(40, 96)
    diagonal = torch.ones(96) if importance == "equal" else correlated(1, 96).square()[0] + 0.1

    q, damp = solve(w, torch.diag(diagonal) * 37.0, scheme, FP16)
    nearest = rtn_round(w, diagonal, scheme, FP16)

    assert rows_that_differ(q, nearest) == 0
    assert damp == DAMP


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_result_does_not_depend_on_the_block_size(scheme: Scheme) -> None:
    w, stats = weight(64, 160), stats_of(correlated(300, 160))

    results = [solve(w, stats.hessian, scheme, FP16, block_size=size)[0] for size in (160, 1, 7, 64, 1000)]

    for q in results[1:]:
        assert rows_that_differ(results[0], q) <= 1


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_the_textbooks_algorithm(scheme: Scheme, seed: int) -> None:
    w, stats = weight(64, 96, seed), stats_of(correlated(400, 96, seed))

    q, damp = solve(w, stats.hessian, scheme, BF16)

    different = (q.codes.numpy() != textbook(w, stats.hessian, q, damp)).any(1).sum()
    assert different <= 1


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_it_beats_rounding_to_nearest_for_every_linear(scheme: Scheme) -> None:
    for seed, (rows, features) in enumerate([(48, 64), (16, 96), (96, 160)]):
        w, x = weight(rows, features, seed), correlated(4 * features, features, seed)

        q, _ = solve(w, stats_of(x).hessian, scheme, FP16)
        nearest = rtn_round(w, stats_of(x).importance, scheme, FP16)

        require_sound(q, w.shape)
        assert output_error(q, w, x) < 0.8 * output_error(nearest, w, x)


def test_two_calibration_sets_give_two_results() -> None:
    w = weight(32, 64)
    first, second = (solve(w, stats_of(correlated(200, 64, seed)).hessian, Scheme(4, 32), FP16)[0] for seed in (1, 2))

    assert (first.codes != second.codes).float().mean() > 0.05


def test_the_size_of_the_inputs_cancels() -> None:
    w, hessian = weight(64, 96), stats_of(correlated(300, 96)).hessian

    results = [solve(w, hessian * factor, Scheme(4, 32), FP16) for factor in (1.0, 2.0**30, 2.0**-30)]

    for q, damp in results[1:]:
        assert rows_that_differ(q, results[0][0]) <= 1
        assert damp == results[0][1]


def test_its_inputs_are_not_modified() -> None:
    w, stats = weight(32, 64), stats_of(correlated(200, 64))
    before = w.clone(), stats.hessian.clone()

    solve(w, stats.hessian, Scheme(4, 32), FP16)

    assert torch.equal(w, before[0]) and torch.equal(stats.hessian, before[1])


@pytest.mark.parametrize("mixed", [False, True])
def test_siblings_rounded_together_are_as_rounded_alone(mixed: bool) -> None:
    stats = stats_of(correlated(300, 96))
    weights = {name: weight(rows, 96, seed) for seed, (name, rows) in enumerate([("q", 64), ("k", 32), ("v", 32)])}
    schemes = dict.fromkeys(weights, Scheme(4, 32, False))
    if mixed:
        schemes["k"] = Scheme(8, -1)

    together = GPTQ.round(weights, stats, schemes, BF16)

    assert together.damp == DAMP and together.fallback == ""
    for name, w in weights.items():
        alone = GPTQ.round({name: w}, stats, schemes, BF16).weights[name]
        require_sound(together.weights[name], w.shape)
        assert together.weights[name].scheme == schemes[name]
        assert rows_that_differ(alone, together.weights[name]) <= 1


@pytest.mark.parametrize("features", [64, 512])
@pytest.mark.parametrize("damp", [0.0, 1e-7, 1e-6, DAMP])
def test_fewer_tokens_than_features(features: int, damp: float) -> None:
    w, x = weight(32, features), correlated(32, features)

    try:
        q, used = solve(w, stats_of(x).hessian, Scheme(4, 32), FP16, damp=damp)
    except NumericalError:
        assert damp < 1e-6  # a caller that asks for next to nothing is told, and never gets NaN
        return

    require_sound(q, w.shape)
    assert used >= damp
    assert np.isfinite(dequantize(q)).all()
    nearest = rtn_round(w, stats_of(x).importance, Scheme(4, 32), FP16)
    assert output_error(q, w, x) < output_error(nearest, w, x)


@pytest.mark.parametrize(
    ("negative", "expected"), [(-0.005, 0.01), (-0.02, 0.03), (-0.05, 0.1), (-0.2, 0.3), (-0.6, 1.0)]
)
def test_damping_climbs_as_far_as_it_must(negative: float, expected: float) -> None:
    hessian = torch.eye(64)
    hessian[3, 3] = negative  # rounding of large sums leaves such eigenvalues
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    before = hessian.clone()

    factor, used = damped_cholesky(hessian, order, 0.01)

    assert used == pytest.approx(expected)
    damped = hessian + used * hessian.diagonal().mean() * torch.eye(64)
    torch.testing.assert_close(factor @ factor.T, damped[order][:, order])
    assert torch.equal(hessian, before)


@pytest.mark.parametrize("bad", [-5.0, float("nan"), float("inf")])
def test_a_matrix_that_no_damping_factors_falls_back_to_rounding_and_says_so(bad: float) -> None:
    w, stats = weight(16, 64), stats_of(correlated(100, 64))
    hessian = stats.hessian.clone()
    hessian[0, 0] = bad * hessian.diagonal().mean()
    broken = InputStats(hessian, stats.abs_sum, stats.count)

    with pytest.raises(NumericalError, match="64 channels has no factor"):
        solve(w, hessian, Scheme(4, 32), FP16)
    result = GPTQ.round({"q": w}, broken, {"q": Scheme(4, 32)}, FP16)

    assert "rounded to nearest: a Gram matrix of 64 channels" in result.fallback
    assert result.damp is None
    require_sound(result.weights["q"], w.shape)


def test_inputs_that_are_all_zero_leave_rounding_to_nearest() -> None:
    w = weight(16, 64)

    q, _ = solve(w, torch.zeros(64, 64), Scheme(4, 32, False), FP16)

    assert rows_that_differ(q, rtn_round(w, None, Scheme(4, 32, False), FP16)) == 0


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_dead_channels_are_rounded_and_never_zeroed(scheme: Scheme) -> None:
    w, x = weight(32, 96), correlated(300, 96)
    dead = torch.tensor([0, 5, 31, 32, 40, 95])
    x[:, dead] = 0

    q, _ = solve(w, stats_of(x).hessian, scheme, FP16)

    group = 96 // q.scale.shape[1]
    scale, zero = (t.float()[:, dead // group] for t in (q.scale, q.zero_point))
    nearest = (w[:, dead] / scale).round().add(zero).clamp(0, scheme.qmax)
    assert torch.equal(q.codes[:, dead].float(), nearest)
