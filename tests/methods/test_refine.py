"""Refinement: every step lowers the same trace, whatever came before it, and the file can still hold the result."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantkit.methods.refine import DAMP, _refine_codes, _refine_scales, refine
from quantkit.methods.rtn import rtn_round
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import Scheme

from .inputs import SCHEMES, correlated, dequantize, require_sound, solve, stats_of, weight

FP16 = torch.float16


def traces(q: QuantizedWeight, w: Tensor, hessian: Tensor, damp: float) -> Tensor:
    """float64 [N]: diag(E (H + d I) E^T), what refinement lowers."""
    e = torch.from_numpy(dequantize(q)).double() - w.double()
    h = hessian.double() + damp * hessian.double().diagonal().mean() * torch.eye(len(hessian))
    return torch.einsum("nk,kl,nl->n", e, h, e)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("start", ["nearest", "fed back"])
def test_every_round_lowers_the_trace_of_every_row(scheme: Scheme, start: str) -> None:
    w, hessian = weight(48, 96), stats_of(correlated(200, 96)).hessian
    q = rtn_round(w, hessian.diagonal(), scheme, FP16) if start == "nearest" else solve(w, hessian, scheme, FP16)[0]

    found = [traces(refine(w, q, hessian, rounds), w, hessian, DAMP) for rounds in (0, 1, 2, 5)]

    for before, after in itertools.pairwise(found):
        assert (after <= before * (1 + 1e-4)).all()
    assert found[-1].sum() < (0.8 if start == "nearest" else 1.0) * found[0].sum()


@pytest.mark.parametrize("step", [_refine_scales, lambda w, q, h: _refine_codes(w, q, h, 16)], ids=["scales", "codes"])
def test_each_half_of_a_round_lowers_the_trace_on_its_own(step: Callable[..., QuantizedWeight]) -> None:
    """Groups and columns depend on each other, so a step must see what the one before it changed."""
    w, x = weight(48, 96), correlated(200, 96)
    x += 3 * x.mean(1, keepdim=True)
    hessian = stats_of(x).hessian
    before = rtn_round(w, None, Scheme(4, 16), FP16, (0.8,))

    after = step(w, before, hessian)

    assert (traces(after, w, hessian, 0) <= traces(before, w, hessian, 0) * (1 + 1e-4)).all()
    assert traces(after, w, hessian, 0).sum() < 0.9 * traces(before, w, hessian, 0).sum()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_result_can_be_stored(scheme: Scheme) -> None:
    w, hessian = weight(48, 96), stats_of(correlated(200, 96)).hessian
    q = rtn_round(w, None, scheme, torch.bfloat16)

    refined = refine(w, q, hessian, 3)

    require_sound(refined, w.shape)
    assert refined.scale.dtype == torch.bfloat16 and refined.scheme == scheme
    assert torch.equal(refined.zero_point, q.zero_point)


def test_it_does_not_depend_on_the_block_size() -> None:
    w, hessian = weight(48, 160), stats_of(correlated(300, 160)).hessian
    q = rtn_round(w, None, Scheme(4, 32), FP16)

    results = [refine(w, q, hessian, 2, block_size=size) for size in (160, 1, 7, 64)]

    for other in results[1:]:
        assert (results[0].codes != other.codes).any(1).sum() <= 1


def test_no_rounds_and_no_inputs_change_nothing() -> None:
    w, hessian = weight(8, 64), stats_of(correlated(100, 64)).hessian
    q = rtn_round(w, None, Scheme(4, 32), FP16)

    assert refine(w, q, hessian, 0) is q
    assert refine(w, q, torch.zeros(64, 64), 3) is q


@pytest.mark.parametrize("tokens", [1, 30])
def test_dead_channels_and_few_tokens_stay_finite(tokens: int) -> None:
    w, x = weight(16, 64), correlated(tokens, 64)
    x[:, [0, 33]] = 0
    w[:, 33] = 0
    w[3] = 0

    refined = refine(w, rtn_round(w, None, Scheme(4, 32, False), FP16), stats_of(x).hessian, 3)

    require_sound(refined, w.shape)
    assert (dequantize(refined)[3] == 0).all()


def test_its_inputs_are_not_modified() -> None:
    w, hessian = weight(16, 64), stats_of(correlated(100, 64)).hessian
    q = rtn_round(w, None, Scheme(4, 32), FP16)
    before = w.clone(), hessian.clone(), q.codes.clone(), q.scale.clone()

    refine(w, q, hessian, 2)

    for now, then in zip((w, hessian, q.codes, q.scale), before, strict=True):
        assert torch.equal(now, then)
