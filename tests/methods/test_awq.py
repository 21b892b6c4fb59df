"""AWQ's rescale: it pays or is left out, for every sibling; its factors are usable; shared heads share them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from quantkit.group import Fold, FoldKind, LinearGroup
from quantkit.methods import METHODS
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import Scheme

from .inputs import SCHEMES, correlated, dequantize, output_error, require_sound, stats_of, weight

FP16 = torch.float16
AWQ, AWQ_GPTQ, RTN = METHODS["awq"], METHODS["awq+gptq"], METHODS["rtn"]


def group_of(names: Mapping[str, Tensor], features: int, repeat: int = 1, head_dim: int | None = None) -> LinearGroup:
    channels = features // repeat
    fold = Fold("norm", FoldKind.NORM, 0, channels, head_dim or channels, repeat)
    return LinearGroup(tuple(names), features, fold=fold)


def rescaled(
    method: object, group: LinearGroup, weights: dict[str, Tensor], x: Tensor, scheme: Scheme
) -> tuple[Tensor | None, dict[str, QuantizedWeight], Tensor]:
    """s, the weights W diag(s) rounded, and s per input channel (ones where there is none)."""
    stats, schemes = stats_of(x), dict.fromkeys(weights, scheme)
    s = AWQ.rescale(group, weights, stats, schemes, FP16, None)
    assert group.fold
    columns = torch.ones(x.shape[1]) if s is None else group.fold.expand(s)
    moved = {name: w * columns for name, w in weights.items()}
    return s, method.round(moved, stats.rescaled(columns), schemes, FP16).weights, columns  # type: ignore[attr-defined]


def error_behind(q: QuantizedWeight, columns: Tensor, w: Tensor, x: Tensor) -> float:
    """Relative error of x W^T when x / s meets the rounded W diag(s)."""
    e = (torch.from_numpy(dequantize(q)).double() / columns.double()) - w.double()
    return float((x.double() @ e.T).square().sum() / (x.double() @ w.double().T).square().sum())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_linear_gets_worse_than_without_it(scheme: Scheme, seed: int) -> None:
    x = correlated(200, 64, seed)
    weights = {"q": weight(64, 64, seed), "k": weight(32, 64, seed + 10)}

    s, rounded, columns = rescaled(AWQ, group_of(weights, 64), weights, x, scheme)

    plain = AWQ.round(weights, stats_of(x), dict.fromkeys(weights, scheme), FP16).weights
    nearest = RTN.round(weights, stats_of(x), dict.fromkeys(weights, scheme), FP16).weights
    for name, w in weights.items():
        require_sound(rounded[name], w.shape)
        error = error_behind(rounded[name], columns, w, x)
        assert error <= output_error(nearest[name], w, x) * (1 + 1e-5)
        # the search tries fewer clips than the final rounding does, so a draw may end a little on the wrong side
        assert error <= output_error(plain[name], w, x) * 1.05
    if s is not None:
        assert s.shape == (64,) and s.dtype == torch.float32
        assert torch.isfinite(s).all() and (s >= 1e-3).all() and (s <= 1e3).all()


def test_it_pays_where_some_channels_are_large() -> None:
    x, weights = correlated(200, 64), {"q": weight(64, 64), "k": weight(32, 64, 1)}
    x[:, 7] *= 30
    scheme = Scheme(4, 32)

    s, rounded, columns = rescaled(AWQ, group_of(weights, 64), weights, x, scheme)

    nearest = RTN.round(weights, stats_of(x), dict.fromkeys(weights, scheme), FP16).weights
    assert s is not None and s[7] == s.max()
    for name, w in weights.items():
        assert error_behind(rounded[name], columns, w, x) < 0.5 * output_error(nearest[name], w, x)


def test_feedback_on_top_is_better_still() -> None:
    x, weights = correlated(200, 64), {"q": weight(64, 64)}
    x[:, 7] *= 30

    _, nearest, columns = rescaled(AWQ, group_of(weights, 64), weights, x, Scheme(4, 32))
    _, fed_back, _ = rescaled(AWQ_GPTQ, group_of(weights, 64), weights, x, Scheme(4, 32))

    assert error_behind(fed_back["q"], columns, weights["q"], x) < error_behind(nearest["q"], columns, weights["q"], x)


def test_heads_that_read_one_producer_head_share_their_factors() -> None:
    x, weights = correlated(200, 64), {"o": weight(64, 64)}
    x[:, 3] *= 30  # head 0 of 4, which reads key/value head 0 together with head 1
    group = group_of(weights, 64, repeat=2, head_dim=16)

    s, _, columns = rescaled(AWQ, group, weights, x, Scheme(4, 32))

    assert s is not None and s.shape == (32,)
    heads = columns.view(4, 16)
    assert torch.equal(heads[0], heads[1]) and torch.equal(heads[2], heads[3])
    assert s.argmax() == 3


@pytest.mark.parametrize("where", ["weight and input", "input", "weight"])
def test_a_channel_of_zeros_gives_finite_factors(where: str) -> None:
    x, w = correlated(200, 64), weight(32, 64)
    x[:, 11] *= 30
    if "input" in where:
        x[:, [5, 40]] = 0
    if "weight" in where:
        w[:, [5, 40]] = 0

    s, rounded, columns = rescaled(AWQ, group_of({"q": w}, 64), {"q": w}, x, Scheme(4, 32))

    nearest = RTN.round({"q": w}, stats_of(x), {"q": Scheme(4, 32)}, FP16).weights["q"]
    assert s is not None and torch.isfinite(s).all() and (s > 0).all()
    require_sound(rounded["q"], w.shape)
    assert error_behind(rounded["q"], columns, w, x) <= output_error(nearest, w, x)
    if "weight" in where:
        assert (dequantize(rounded["q"])[:, [5, 40]] == 0).all()


@pytest.mark.parametrize("x", [torch.zeros(20, 64), correlated(1, 64)], ids=["zeros", "one token"])
def test_inputs_that_say_nothing_or_little(x: Tensor) -> None:
    w = weight(32, 64)

    s, rounded, _ = rescaled(AWQ, group_of({"q": w}, 64), {"q": w}, x, Scheme(4, 32))

    assert s is None or bool(torch.isfinite(s).all())
    require_sound(rounded["q"], w.shape)


def test_a_loss_that_is_given_decides() -> None:
    x, weights = correlated(200, 64), {"q": weight(32, 64)}
    x[:, 7] *= 30
    stats, schemes, group = stats_of(x), {"q": Scheme(4, 32)}, group_of(weights, 64)
    given: list[Mapping[str, Tensor]] = []

    def output(candidate: Mapping[str, Tensor]) -> float:
        given.append(candidate)
        return float((x @ (candidate["q"] - weights["q"]).T).square().sum())

    assert AWQ.rescale(group, weights, stats, schemes, FP16, output) is not None
    assert AWQ.rescale(group, weights, stats, schemes, FP16, lambda _: 1.0) is None  # nothing is better than nothing

    assert len(given) > 1
    for candidate in given:  # weights as they would be after rounding, in their original scale
        assert candidate.keys() == weights.keys()
        assert 0 < (candidate["q"] - weights["q"]).norm() < 0.3 * weights["q"].norm()


def test_its_inputs_are_not_modified() -> None:
    x, weights = correlated(200, 64), {"q": weight(32, 64)}
    stats = stats_of(x)
    before = weights["q"].clone(), stats.hessian.clone(), stats.abs_sum.clone()

    AWQ.rescale(group_of(weights, 64), weights, stats, {"q": Scheme(4, 32)}, FP16, None)
    AWQ.round(weights, stats, {"q": Scheme(4, 32)}, FP16)

    assert torch.equal(weights["q"], before[0])
    assert torch.equal(stats.hessian, before[1]) and torch.equal(stats.abs_sum, before[2])


@pytest.mark.parametrize("name", sorted(METHODS))
def test_methods_without_a_rescale_leave_the_model_alone(name: str) -> None:
    x, weights = correlated(200, 64), {"q": weight(32, 64)}
    x[:, 7] *= 30

    s = METHODS[name].rescale(group_of(weights, 64), weights, stats_of(x), {"q": Scheme(4, 32)}, FP16, None)

    assert (s is not None) is name.startswith("awq")
