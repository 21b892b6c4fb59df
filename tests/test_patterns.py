"""Patterns on module names, and the schemes they assign."""

from __future__ import annotations

import pytest

from quantkit.errors import UsageError
from quantkit.patterns import assign, closest, match
from quantkit.scheme import Scheme, parse_override

DOWN = "model.layers.3.mlp.down_proj"
NAMES = [f"model.layers.{block}.{part}" for block in (0, 3, 13) for part in ("self_attn.q_proj", "mlp.down_proj")]


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        (DOWN, True),
        ("down_proj", True),
        ("mlp.down_proj", True),
        ("mlp", True),
        ("layers.3", True),
        ("model", True),
        ("own_proj", False),
        ("down", False),
        ("layers.13", False),
        ("*.down_proj", True),
        ("*down*", True),
        ("model.layers.*.mlp.*", True),
        ("model.layers.?.mlp.down_proj", True),
        ("model.layers.[0-3].*", True),
        ("model.layers.[45].*", False),
        ("down*", False),
        ("*.DOWN_PROJ", False),
        ("re:.*down", True),
        (r"re:model\.layers\.\d+\.", True),
        ("re:down_proj", False),
        (r"re:.*\.mlp$", False),
    ],
)
def test_match(pattern: str, matches: bool) -> None:
    assert match(pattern, DOWN) is matches


def test_a_broken_regular_expression_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"pattern `re:\(\[` is not a regular expression"):
        match("re:([", DOWN)


def test_later_overrides_win_field_by_field_and_ignore_wins_over_all() -> None:
    overrides = [
        parse_override("down_proj: bits=8,group_size=32"),
        parse_override("layers.3: symmetric=false"),
        parse_override("layers.13: group_size=64"),
    ]

    found = assign(NAMES, Scheme(), ["model.layers.13.self_attn.*"], overrides, ["lm_head"])

    assert found == {
        "model.layers.0.self_attn.q_proj": Scheme(),
        "model.layers.0.mlp.down_proj": Scheme(8, 32),
        "model.layers.3.self_attn.q_proj": Scheme(4, 128, symmetric=False),
        "model.layers.3.mlp.down_proj": Scheme(8, 32, symmetric=False),
        "model.layers.13.self_attn.q_proj": None,
        "model.layers.13.mlp.down_proj": Scheme(8, 64),
        "lm_head": None,
    }
    assert list(found) == [*NAMES, "lm_head"]


def test_a_pattern_may_name_what_is_always_kept() -> None:
    found = assign(NAMES, Scheme(), ["lm_head"], [parse_override("re:.*: bits=8")], ["lm_head"])

    assert found["lm_head"] is None
    assert found[DOWN] == Scheme(8)


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("downproj", "did you mean `down_proj`?"),
        ("model.layers.*.mlp.down_prj", "did you mean `model.layers.*.mlp.down_proj`?"),
        ("zzz", "the linears of this model end in `q_proj`, `down_proj`"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_with_the_closest_name(pattern: str, hint: str) -> None:
    with pytest.raises(UsageError) as ignored:
        assign(NAMES, Scheme(), [pattern])
    with pytest.raises(UsageError) as overridden:
        assign(NAMES, Scheme(), overrides=[parse_override(f"{pattern}: bits=8")])

    assert ignored.value.message == f"`--ignore` pattern `{pattern}` matches no linear"
    assert overridden.value.message == f"`--override` pattern `{pattern}` matches no linear"
    assert ignored.value.hint == overridden.value.hint == hint


def test_closest() -> None:
    assert closest("gtpq", ["rtn", "gptq", "awq"]) == "gptq"
    assert closest("zzz", ["rtn", "gptq", "awq"]) == ""
