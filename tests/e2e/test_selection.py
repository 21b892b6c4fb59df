"""--ignore, --override and --indivisible do what they say to the linears they name, and nothing to the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo.artifacts import bits_of, changed, packed_linears, read_all, read_config, same_bytes
from zoo.models import rows

import quantkit
from quantkit.errors import ResourceError, UnsupportedScheme, UsageError
from quantkit.pipeline import quantize
from quantkit.plan import make_plan
from quantkit.recipe import Recipe

Make = Callable[..., Any]
Zoo = Callable[..., Path]


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize(
    "pattern", ["q_proj", "down_proj", "layers.1", "re:.*layers\\.0\\.mlp", "*.0.self_attn.v_proj"]
)
def test_an_ignored_linear_keeps_its_bytes(make_artifact: Make, method: str, pattern: str) -> None:
    whole = make_artifact("llama", method=method)
    made = make_artifact("llama", method=method, ignore=[pattern])

    ignored = set(packed_linears(read_all(whole.path))) - set(packed_linears(read_all(made.path)))
    expected = {
        "q_proj": ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"],
        "down_proj": ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"],
        "*.0.self_attn.v_proj": ["model.layers.0.self_attn.v_proj"],
    }.get(pattern)
    assert ignored and (expected is None or sorted(ignored) == expected)
    assert not changed(made.source, made.path) & {f"{name}.weight" for name in ignored}
    assert ignored <= set(read_config(made.path)["quantization_config"]["ignore"])
    assert ignored.isdisjoint(made.record.linears)
    # no fold may have gone through a linear that stays as it is
    for fold in made.record.folds:
        touched = {f"{fold['block']}.{name}" for name in (*fold["linears"], fold["producer"])}
        assert not touched & ignored


def test_an_override_changes_only_what_it_names(make_artifact: Make) -> None:
    plain = make_artifact("llama", method="rtn")
    made = make_artifact(
        "llama", method="rtn", override=["down_proj: bits=8,group_size=16", "layers.1: symmetric=false"]
    )

    before, after = read_all(plain.path), read_all(made.path)
    for linear in packed_linears(after):
        down, asymmetric = linear.endswith("down_proj"), ".1." in linear
        n, k = after[f"{linear}.weight_shape"].tolist()
        assert after[f"{linear}.weight_packed"].shape == (n, k * (8 if down else 4) // 32)
        assert after[f"{linear}.weight_scale"].shape == (n, k // (16 if down else 32))
        assert (f"{linear}.weight_zero_point" in after) is asymmetric
        assert bits_of(read_config(made.path), linear) == (8 if down else 4)
        if not down and not asymmetric:
            assert same_bytes(before[f"{linear}.weight_packed"], after[f"{linear}.weight_packed"])
    ids = torch.stack(rows(12))
    with torch.no_grad():
        assert torch.isfinite(quantkit.load(made.path, "cpu")(ids).logits).all()


@pytest.mark.parametrize("options", [{"override": ["q_proj: bits=8"]}, {"ignore": ["q_proj"]}])
def test_schemes_that_differ_within_a_group_are_pointed_out_once(
    zoo: Zoo, calibration: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    from quantkit.events import Note
    from quantkit.pipeline import quantize

    events: list[Any] = []
    recipe = Recipe(group_size=32, calibration=str(calibration), method="rtn").merged(**options)

    quantize(recipe, str(zoo("llama")), tmp_path / "out", emit=events.append)

    notes = [event.message for event in events if isinstance(event, Note) and "share an input" in event.message]
    assert len(notes) == 1 and notes[0].startswith(
        "self_attn.q_proj, self_attn.k_proj, self_attn.v_proj share an input"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignore": ["gate_prj"]}, r"`--ignore` pattern `gate_prj` matches no linear"),
        ({"override": ["layers.9: bits=8"]}, r"`--override` pattern `layers.9` matches no linear"),
        ({"ignore": ["re:.*"]}, "nothing is left to quantize"),
    ],
)
def test_patterns_that_leave_nothing_or_name_nothing(zoo: Zoo, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_plan(Recipe().merged(group_size=32, **options), str(zoo("llama")))


# 64 divides the 64 hidden features, and not the 96 of the MLP
def test_an_indivisible_linear_fails_the_plan_in_words(zoo: Zoo) -> None:
    with pytest.raises(UnsupportedScheme) as refused:
        make_plan(Recipe(group_size=64), str(zoo("llama")))

    assert "2 linears do not fit: `*.down_proj` (2, 96 inputs)" in refused.value.message
    assert all(f" {size}" in refused.value.hint for size in (32, 96, 48, 16, -1))
    assert "`--indivisible smaller-group`" in refused.value.hint


def test_an_indivisible_linear_gets_a_smaller_group(make_artifact: Make) -> None:
    made = make_artifact("llama", method="gptq", group_size=64, indivisible="smaller-group")

    tensors = read_all(made.path)
    for linear in packed_linears(tensors):
        _, k = tensors[f"{linear}.weight_shape"].tolist()
        group = k // tensors[f"{linear}.weight_scale"].shape[1]
        assert group == (48 if linear.endswith("down_proj") else 64)
    reasons = {fallback.name: fallback.reason for fallback in made.record.fallbacks}
    assert reasons == dict.fromkeys(
        ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"), "group size 48 instead of 64"
    )


def test_an_indivisible_linear_is_kept(make_artifact: Make) -> None:
    made = make_artifact("llama", method="gptq", group_size=64, indivisible="keep")

    packed = packed_linears(read_all(made.path))
    assert packed and not any(linear.endswith("down_proj") for linear in packed)
    assert not any("down_proj" in name for name in changed(made.source, made.path))
    assert len(made.record.fallbacks) == 2
    assert all("kept in 16 bit" in fallback.reason for fallback in made.record.fallbacks)


@pytest.mark.parametrize("size", [7, 40, 4096])
def test_a_group_size_that_divides_nothing(zoo: Zoo, size: int) -> None:
    with pytest.raises(UnsupportedScheme, match=r"14 linears do not fit: .*q_proj"):
        make_plan(Recipe(group_size=size), str(zoo("llama")))
    with pytest.raises(UsageError, match="nothing is left to quantize"):
        make_plan(Recipe(group_size=size, indivisible="keep"), str(zoo("llama")))


def test_a_width_that_no_group_size_helps(zoo: Zoo) -> None:
    path = str(zoo("llama", intermediate_size=100))

    with pytest.raises(UnsupportedScheme, match=r"2 linears do not fit: `\*\.down_proj`") as refused:
        make_plan(Recipe(group_size=64), path)
    assert "--group-size" not in refused.value.hint and "--indivisible keep" in refused.value.hint
    with pytest.raises(UnsupportedScheme, match="100 output features") as refused:
        make_plan(Recipe(group_size=-1, symmetric=False, ignore=("down_proj",)), path)
    assert "--group-size" not in refused.value.hint and "--symmetric" in refused.value.hint


def test_an_output_name_that_no_file_system_takes(zoo: Zoo) -> None:
    with pytest.raises(ResourceError, match="cannot be written: File name too long"):
        quantize(Recipe(group_size=32), str(zoo("llama")), Path("x" * 300))


def test_zero_points_that_fill_no_word_are_refused_and_kept(zoo: Zoo) -> None:
    path = str(zoo("llama", intermediate_size=100))  # 100 outputs of gate and up: no multiple of 8
    recipe = Recipe(group_size=-1, symmetric=False, ignore=("down_proj",))

    with pytest.raises(UnsupportedScheme, match=r"4 linears do not fit.*100 output features are not a multiple of 8"):
        make_plan(recipe, path)
    plan = make_plan(recipe.merged(indivisible="keep"), path)

    assert sorted({name.rpartition(".")[2] for name in plan.packed}) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert len(plan.fallbacks) == 4
