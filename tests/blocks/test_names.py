"""Parameter names to tensor names: one change of prefix for all, found by trying."""

from __future__ import annotations

import pytest

from quantkit.blocks.names import match_names

PARAMETERS = ["model.embed.weight", "model.layers.0.q.weight", "model.layers.1.q.weight", "lm_head.weight"]


def renamed(old: str, new: str) -> dict[str, str]:
    return {name: new + name.removeprefix(old) for name in PARAMETERS if name.startswith(old)}


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        (PARAMETERS, {name: name for name in PARAMETERS}),
        # saved from the bare base model: the head is not there
        (["embed.weight", "layers.0.q.weight", "layers.1.q.weight"], renamed("model.", "")),
        # held inside a larger model, whole or without the base model's own prefix
        ([f"language_model.{n}" for n in PARAMETERS], {n: f"language_model.{n}" for n in PARAMETERS}),
        (
            ["model.language_model.embed.weight", "model.language_model.layers.0.q.weight", "vision.layers.0.q.weight"],
            {
                "model.embed.weight": "model.language_model.embed.weight",
                "model.layers.0.q.weight": "model.language_model.layers.0.q.weight",
            },
        ),
        ([], {}),
        (["something.else"], {}),
    ],
)
def test_the_change_of_prefix_that_finds_most(stored: list[str], found: dict[str, str]) -> None:
    assert match_names(PARAMETERS, stored, "model") == found


def test_a_base_model_that_was_saved_alone_is_found_under_its_prefix() -> None:
    stored = ["transformer.h.0.w", "transformer.h.1.w"]

    assert match_names(["h.0.w", "h.1.w"], stored, "transformer") == {"h.0.w": stored[0], "h.1.w": stored[1]}


def test_no_tensor_gets_a_change_of_its_own() -> None:
    stored = ["model.embed.weight", "model.layers.0.q.weight", "other.model.layers.1.q.weight"]

    found = match_names(PARAMETERS, stored, "model")

    assert found == {name: name for name in stored[:2]}


def test_nothing_wanted_is_nothing_found() -> None:
    assert match_names([], ["a"], "model") == {}
