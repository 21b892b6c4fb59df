"""Rounding to nearest as a method: each linear on its own, weighed by what its inputs were."""

from __future__ import annotations

import pytest
import torch

from quantkit.methods import METHODS
from quantkit.methods.rtn import rtn_round
from quantkit.scheme import Scheme

from .inputs import SCHEMES, correlated, output_error, require_sound, rows_that_differ, stats_of, weight


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_siblings_together_are_as_alone(scheme: Scheme) -> None:
    weights = {"q": weight(32, 64), "k": weight(16, 64, 1)}
    stats = stats_of(correlated(100, 64))

    result = METHODS["rtn"].round(weights, stats, dict.fromkeys(weights, scheme), torch.bfloat16)

    assert (result.damp, result.fallback) == (None, "")
    for name, w in weights.items():
        require_sound(result.weights[name], w.shape)
        assert rows_that_differ(result.weights[name], rtn_round(w, stats.importance, scheme, torch.bfloat16)) == 0


def test_the_search_lowers_the_output_error() -> None:
    x, w = correlated(200, 64), weight(64, 64)

    searched = rtn_round(w, stats_of(x).importance, Scheme(4, 32), torch.float16)
    plain = rtn_round(w, None, Scheme(4, 32), torch.float16, (1.0,))

    assert output_error(searched, w, x) < 0.95 * output_error(plain, w, x)


def test_eight_bits_are_much_finer_than_four() -> None:
    x, w = correlated(200, 64), weight(64, 64)

    four, eight = (rtn_round(w, None, Scheme(bits, 32), torch.float16) for bits in (4, 8))

    assert output_error(eight, w, x) < output_error(four, w, x) / 100
