"""Every architecture, every method: from checkpoint to artifact to a running model, judged by independent readers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo.artifacts import changed, packed_linears, read_all, read_config, same_bytes, twin
from zoo.models import EVERY, TWELVE, full_model, rows

import quantkit
from quantkit.recipe import METHOD_NAMES

Make = Callable[..., Any]
IDS = torch.stack(rows(18, 18, seed=7))
SCHEMES: dict[str, dict[str, Any]] = {
    "rtn": {"symmetric": False},
    "gptq": {"symmetric": True},
    "awq": {"symmetric": False, "group_size": 16},
    "awq+gptq": {"symmetric": True},
}
RUNS = [(architecture, method) for architecture in TWELVE for method in METHOD_NAMES] + [
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
    made = make_artifact(architecture, method="awq", bits=8, group_size=16)

    reference = logits(full_model(made.source))
    moved = logits(quantkit.load(made.path, "cpu", dtype=torch.float32)) - reference

    spread = reference - reference.mean(-1, keepdim=True)
    assert moved.norm() / spread.norm() < 0.03


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
