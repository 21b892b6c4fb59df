"""Every architecture, every method: from checkpoint to artifact to a running model, judged by independent readers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo.artifacts import changed, dequantized, packed_linears, read_all, read_config, same_bytes, twin
from zoo.models import EVERY, TWELVE, full_model, rows

import quantkit

Make = Callable[..., Any]
IDS = torch.stack(rows(18, 18, seed=7))
SCHEMES: dict[str, dict[str, Any]] = {
    "rtn": {"symmetric": False},
    "gptq": {"symmetric": True},
    "awq": {"symmetric": False, "group_size": 16},
    "awq+gptq": {"symmetric": True},
}
RUNS = [(architecture, method) for architecture in TWELVE for method in SCHEMES] + [
    (architecture, "awq+gptq") for architecture in EVERY[len(TWELVE) :]
]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(IDS, use_cache=False).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(("architecture", "method"), RUNS)
def test_the_artifact_is_complete_and_runs(make_artifact: Make, tmp_path: Path, architecture: str, method: str) -> None:
    made = make_artifact(architecture, method=method, **SCHEMES[method])
    before, after = read_all(made.source), read_all(made.path)

    # every tensor of the source is packed, rewritten by a fold, or there with its bytes; nothing else is there
    packed = packed_linears(after)
    moved = changed(made.source, made.path)
    rewritten = moved - {f"{linear}.weight" for linear in packed}
    assert packed == sorted(made.record.linears)
    assert {f"{linear}.weight" for linear in packed} <= moved
    assert made.record.tensors == {
        "source": len(before),
        "packed": len(packed),
        "rewritten": len(rewritten),
        "copied": len(before) - len(moved),
    }
    owned = {f"{linear}.{leaf}" for linear in packed for leaf in leaves(SCHEMES[method]["symmetric"])}
    assert set(after) == owned | {name for name in before if name.removesuffix(".weight") not in packed}
    assert rewritten == folded_tensors(made.record, set(before), set(packed))
    assert all(before[name].dtype == after[name].dtype for name in rewritten)
    if not method.startswith("awq"):
        assert rewritten == set() and made.record.fallbacks == []

    # config = source + quantization_config
    config = read_config(made.path)
    assert config.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert config == read_config(made.source)

    # the model that quantkit loads computes what the stored codes and scales say
    loaded = quantkit.load(made.path, "cpu", dtype=torch.float32)
    assert torch.equal(logits(loaded), logits(twin(made.path, tmp_path / "twin")))
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


def leaves(symmetric: bool) -> tuple[str, ...]:
    return ("weight_packed", "weight_scale", "weight_shape") + (() if symmetric else ("weight_zero_point",))


def folded_tensors(record: Any, names: set[str], packed: set[str]) -> set[str]:
    """Weights and biases of the applied folds' producers, where they exist and are not packed."""
    applied = {f"{fold['block']}.{fold['producer']}" for fold in record.folds if fold["applied"]}
    found = {f"{producer}.{leaf}" for producer in applied for leaf in ("weight", "bias")}
    return {name for name in found if name in names and name.removesuffix(".weight") not in packed}


@pytest.mark.parametrize("architecture", EVERY)
def test_at_eight_bits_nothing_but_rounding_remains(make_artifact: Make, architecture: str) -> None:
    """A fold that was wrong, or forgot a consumer, would show here as a different model."""
    moved = {}
    for method in ("rtn", "awq"):
        made = make_artifact(architecture, method=method, bits=8, group_size=16)
        reference = logits(full_model(made.source))
        difference = logits(quantkit.load(made.path, "cpu", dtype=torch.float32)) - reference
        moved[method] = float(difference.norm() / (reference - reference.mean(-1, keepdim=True)).norm())

    # eight blocks of random weights amplify what enters them
    assert moved["rtn"] < (0.2 if architecture == "gemma3_text" else 0.05)
    assert moved["awq"] < 2 * moved["rtn"]


@pytest.mark.parametrize("architecture", TWELVE)
def test_feedback_beats_rounding_to_nearest_for_every_linear_of_the_first_block(
    make_artifact: Make, architecture: str
) -> None:
    errors = {
        method: {
            name: entry["error"] for name, entry in make_artifact(architecture, method=method).record.linears.items()
        }
        for method in ("rtn", "gptq")
    }

    first = [name for name in errors["rtn"] if ".0." in name]  # later blocks see other inputs
    assert first
    for name in first:
        assert errors["gptq"][name] < errors["rtn"][name], name


# norm and linears of the last block: linears that only the fold of their norm can have changed, and whose inputs no
# other linear of that block has a part in
READERS = {
    "cohere": ("model.layers.1", "input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj")),
    "gpt_neox": ("gpt_neox.layers.1", "input_layernorm", ("attention.query_key_value",)),
    "gemma2": ("model.layers.1", "input_layernorm", ("self_attn.q_proj", "self_attn.k_proj")),
}


@pytest.mark.parametrize("method", SCHEMES)
@pytest.mark.parametrize("architecture", sorted(READERS))
@torch.no_grad()
def test_recorded_errors_are_those_of_the_artifact(
    make_artifact: Make, calibration: Path, architecture: str, method: str
) -> None:
    """Behind a quantized block, on the inputs that the artifact itself sees, with what a fold moved moved back."""
    made = make_artifact(architecture, method=method)
    before, after = read_all(made.source), dequantized(made.path)
    model = quantkit.load(made.path, "cpu", dtype=torch.float32)
    block, norm, names = READERS[architecture]
    one = 1.0 if architecture.startswith("gemma") else 0.0
    scales = (before[f"{block}.{norm}.weight"].double() + one) / (after[f"{block}.{norm}.weight"].double() + one)
    for name in (f"{block}.{each}" for each in names):
        x = inputs_of(model, name, calibration)
        weight = before[f"{name}.weight"].double() * scales
        error = x @ (after[f"{name}.weight"].double() - weight).T
        relative = float(error.square().sum() / (x @ weight.T).square().sum())
        assert made.record.linears[name]["error"] == pytest.approx(relative, rel=2e-3)
    if not method.startswith("awq"):
        assert torch.equal(scales, torch.ones_like(scales))
    elif architecture == "cohere":
        assert (scales.log().abs() > 0.01).any()  # or this would say nothing about folds


def inputs_of(model: Any, name: str, calibration: Path) -> torch.Tensor:
    """What a linear reads over the calibration rows, float64 [tokens, K]."""
    found: list[torch.Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: found.append(args[0][0].double()))
    for line in calibration.read_text().splitlines():
        model(torch.tensor([json.loads(line)["input_ids"]]), use_cache=False)
    handle.remove()
    return torch.cat(found)


def test_the_record_is_what_was_returned(make_artifact: Make) -> None:
    made = make_artifact("llama", method="awq")

    written = json.loads((made.path / "quantkit.json").read_text())

    assert written == json.loads(json.dumps(made.record.to_json()))
    assert written["tensors"]["source"] == sum(v for key, v in written["tensors"].items() if key != "source")
    assert set(written["output"]["sha256"]) == {file.name for file in made.path.glob("*.safetensors")}
    assert written["calibration"]["rows_used"] == 8 and written["calibration"]["tokens"] == 126
    assert all(entry["tokens"] == 126 and 0 < entry["error"] < 1 for entry in written["linears"].values())
    assert any(fold["applied"] for fold in written["folds"])
    assert str(made.path.parent) not in (made.path / "config.json").read_text()


def test_most_folds_of_the_zoo_are_used(make_artifact: Make) -> None:
    """Or the tests above would say little about them."""
    folds = [fold for architecture in TWELVE for fold in make_artifact(architecture, method="awq").record.folds]

    assert sum(fold["applied"] for fold in folds) > 0.6 * len(folds)


def test_two_calibration_sets_give_two_artifacts(make_artifact: Make, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in rows(20, 12, 17, 9, seed=5)))

    first = read_all(make_artifact("llama", method="gptq").path)
    second = read_all(make_artifact("llama", method="gptq", calibration=str(other)).path)

    different = [
        name
        for name in packed_linears(first)
        if not same_bytes(first[f"{name}.weight_packed"], second[f"{name}.weight_packed"])
    ]
    assert different == packed_linears(first)
