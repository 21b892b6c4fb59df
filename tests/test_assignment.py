"""Which scheme each linear gets: where shapes, formats and a target engine leave a choice, and where none is left."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from quantkit.assignment import choose_schemes
from quantkit.errors import UnsupportedScheme, UsageError
from quantkit.events import Fallback
from quantkit.recipe import Recipe
from quantkit.scheme import Scheme

Shapes = dict[str, tuple[int, int]]


def block(hidden: int, intermediate: int, query: int | None = None, key: int | None = None) -> Shapes:
    """One decoder block of Llama's shape."""
    query, key = query or hidden, key or hidden
    return {
        "model.layers.0.self_attn.q_proj": (query, hidden),
        "model.layers.0.self_attn.k_proj": (key, hidden),
        "model.layers.0.self_attn.v_proj": (key, hidden),
        "model.layers.0.self_attn.o_proj": (hidden, query),
        "model.layers.0.mlp.gate_proj": (intermediate, hidden),
        "model.layers.0.mlp.up_proj": (intermediate, hidden),
        "model.layers.0.mlp.down_proj": (hidden, intermediate),
    }


def chosen(
    shapes: Shapes, config: Mapping[str, Any] | None = None, **recipe: Any
) -> tuple[dict[str, str | None], dict[str, str]]:
    """{last name: scheme}, and {last name: why it is not the one asked for}."""
    source: Any = SimpleNamespace(config={"num_attention_heads": 4, "dtype": "bfloat16"} | dict(config or {}))
    schemes, fallbacks = choose_schemes(Recipe().merged(**recipe).validate(), source, shapes)
    short = {name.rpartition(".")[2]: str(scheme) if scheme else None for name, scheme in schemes.items()}
    return short, {fallback.name.rpartition(".")[2]: fallback.reason for fallback in fallbacks}


DIVIDES = "576 input features are not a multiple of group size 128"


@pytest.mark.parametrize(
    ("shapes", "recipe", "message"),
    [
        (block(576, 1536), {}, DIVIDES),
        (block(576, 1536), {"target": "vllm"}, DIVIDES),
        (block(256, 192), {}, "192 input features are not a multiple of group size 128"),
        (block(256, 4304), {}, "4304 input features are not a multiple of group size 128"),
        (block(256, 512, key=12), {"symmetric": False}, "12 output features are not a multiple of 8"),
        # whole on one rank; a rank of two would have 924 inputs of down_proj
        (block(256, 1848), {"group_size": -1, "target": "vllm", "tp": 2}, "924 input features on each of 2 ranks"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_remedy(shapes: Shapes, recipe: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedScheme) as caught:
        chosen(shapes, **recipe)

    assert message in caught.value.message.replace(",", "") and caught.value.hint


def test_a_smaller_group_is_chosen_where_the_target_has_a_kernel_for_it() -> None:
    # 576 = 9 * 64, and 96, which divides it, too, has no Marlin kernel
    schemes, why = chosen(block(576, 1536), target="vllm", indivisible="smaller-group")

    assert schemes["q_proj"] == schemes["gate_proj"] == str(Scheme(4, 64))
    assert schemes["down_proj"] == str(Scheme(4, 128)) and "down_proj" not in why


def test_a_group_must_divide_what_one_rank_has() -> None:
    # 768 / 4 ranks = 192 inputs of down_proj
    shapes = block(512, 768)
    whole, _ = chosen(shapes, target="vllm")
    assert set(whole.values()) == {str(Scheme(4, 128))}

    with pytest.raises(
        UnsupportedScheme, match=r"vllm on 4 ranks does not load.*down_proj.*192 input features"
    ) as caught:
        chosen(shapes, target="vllm", tp=4)
    assert "`--group-size 64`" in caught.value.hint

    smaller, why = chosen(shapes, target="vllm", tp=4, indivisible="smaller-group")
    assert smaller == whole | {"down_proj": str(Scheme(4, 64))}
    assert list(why) == ["down_proj"] and why["down_proj"].startswith("group size 64, because of vllm: ")

    kept, why = chosen(shapes, target="vllm", tp=4, indivisible="keep")
    assert kept == whole | {"down_proj": None}
    assert list(why) == ["down_proj"] and why["down_proj"].startswith("kept in 16 bit, because of vllm: ")


def test_linears_that_an_engine_fuses_are_kept_together() -> None:
    schemes, why = chosen(block(256, 512), target="vllm", override=("q_proj: bits=8",), indivisible="keep")

    assert [name for name, scheme in schemes.items() if scheme is None] == ["q_proj", "k_proj", "v_proj"]
    assert set(why) == {"q_proj", "k_proj", "v_proj"}


def test_a_smaller_group_is_of_no_use_where_the_group_is_not_the_cause() -> None:
    # 12 outputs are no whole number of words of zero points, whatever the group
    schemes, why = chosen(block(256, 512, key=12), symmetric=False, indivisible="smaller-group")

    assert schemes["k_proj"] is schemes["v_proj"] is None and schemes["q_proj"] is not None
    assert set(why) == {"k_proj", "v_proj"}


def test_a_format_that_the_engine_does_not_read_is_refused_whatever_the_policy() -> None:
    for policy in ("fail", "smaller-group", "keep"):
        with pytest.raises(UnsupportedScheme, match="not W4A16_AWQ") as caught:
            chosen(block(256, 512), format=("modelopt",), target="vllm", indivisible=policy)
        assert "`--format compressed-tensors`" in caught.value.hint


def test_every_format_of_the_run_must_load() -> None:
    both = {"format": ("compressed-tensors", "awq"), "symmetric": False}
    assert set(chosen(block(256, 512), target="vllm", **both)[0].values()) == {str(Scheme(4, 128, symmetric=False))}

    with pytest.raises(UnsupportedScheme, match=r"^tgi does not load this as `compressed-tensors`"):
        chosen(block(256, 512), target="tgi", **both)


def test_scales_of_a_cache_that_the_engine_will_not_read_are_told() -> None:
    source: Any = SimpleNamespace(config={})
    recipe = Recipe(format=("compressed-tensors", "awq"), kv_cache="fp8", target="vllm").validate()

    _, fallbacks = choose_schemes(recipe, source, block(256, 512))

    assert [fallback.name for fallback in fallbacks] == ["kv_cache in awq"]
    assert isinstance(fallbacks[0], Fallback) and "scales" in fallbacks[0].reason


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(UsageError, match="nothing is left to quantize"):
        chosen(block(256, 512), ignore=("*",))
