"""One calibration, several artifacts: the same weights in each, judged by readers that share no code with quantkit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formats.independent import dequantize, read_safetensors
from zoo.artifacts import digests, packed_linears, read_all, read_config

import quantkit
from quantkit.errors import CheckpointError, QuantkitError, UsageError
from quantkit.eval.perplexity import perplexity
from quantkit.formats import FORMATS
from quantkit.pipeline import quantize
from quantkit.recipe import Recipe

Make = Callable[..., Any]
ALL = ("compressed-tensors", "gptq", "awq", "modelopt")


@pytest.fixture(scope="module")
def made(make_artifact: Make) -> Any:
    return make_artifact("llama", method="gptq", format=ALL, kv_cache="fp8")


def weights(path: Path, linears: list[str]) -> dict[str, np.ndarray]:
    tensors = read_safetensors(path / "model.safetensors")
    return {name: dequantize(read_config(path)["quantization_config"], tensors, name) for name in linears}


def test_every_format_holds_the_same_weights_to_the_last_bit(made: Any) -> None:
    assert sorted(folder.name for folder in made.path.iterdir()) == sorted(ALL)
    linears = packed_linears(read_all(made.path / "compressed-tensors"))
    assert len(linears) == 14

    # the source is bfloat16, and so are these scales
    first, modelopt = weights(made.path / "compressed-tensors", linears), weights(made.path / "modelopt", linears)
    assert all(np.array_equal(first[name], modelopt[name]) for name in linears)
    # these store float16; what that moved was said
    gptq, awq = weights(made.path / "gptq", linears), weights(made.path / "awq", linears)
    assert all(np.array_equal(gptq[name], awq[name]) for name in linears)
    moved = [name for name in linears if not np.array_equal(gptq[name], first[name])]
    for fmt in ("gptq", "awq"):
        assert bool(moved) == bool(made.record.outputs[fmt].get("scales_moved", {}).get("moved"))
    assert all(np.allclose(gptq[name], first[name], rtol=2**-10, atol=1e-7) for name in linears)
    assert all(np.abs(weight).max() > 0 for weight in first.values())


def test_an_artifact_among_several_is_the_one_that_it_is_alone(make_artifact: Make, made: Any) -> None:
    for fmt in ALL:
        alone = make_artifact("llama", method="gptq", format=(fmt,), kv_cache="fp8")
        assert digests(alone.path) == digests(made.path / fmt) == made.record.outputs[fmt]["sha256"], fmt
        for name in sorted({file.name for file in alone.path.iterdir()} - {"quantkit.json", "quantkit-recipe.yaml"}):
            assert (alone.path / name).read_bytes() == (made.path / fmt / name).read_bytes(), name


def test_every_format_loads_and_computes_the_same(made: Any) -> None:
    ids = torch.arange(24).reshape(2, 12) % 100 + 4
    models = {fmt: quantkit.load(made.path / fmt, "cpu", dtype=torch.float32) for fmt in ALL}
    with torch.no_grad():
        logits = {fmt: model(ids).logits for fmt, model in models.items()}

    assert torch.equal(logits["compressed-tensors"], logits["modelopt"])
    assert torch.equal(logits["gptq"], logits["awq"])
    torch.testing.assert_close(logits["gptq"], logits["modelopt"], rtol=0, atol=1e-2)


def test_scales_of_the_cache_have_each_formats_names(made: Any) -> None:
    found = made.record.to_json()["kv_cache"]
    assert list(found) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert all(0 < each[which] < 1 for each in found.values() for which in "kv")

    tensors = {fmt: read_all(made.path / fmt) for fmt in ALL}
    for name, each in found.items():
        for which in "kv":
            plain = tensors["compressed-tensors"][f"{name}.{which}_scale"]
            nested = tensors["modelopt"][f"{name}.{which}_proj.{which}_scale"]
            assert plain.numel() == nested.numel() == 1
            # written in float32
            assert float(plain) == float(nested) == pytest.approx(each[which], rel=1e-6)
    assert not any(name.endswith(("k_scale", "v_scale")) for fmt in ("gptq", "awq") for name in tensors[fmt])

    scheme = read_config(made.path / "compressed-tensors")["quantization_config"]["kv_cache_scheme"]
    assert (scheme["type"], scheme["num_bits"], scheme["symmetric"], scheme["strategy"]) == ("float", 8, True, "tensor")
    beside = json.loads((made.path / "modelopt" / "hf_quant_config.json").read_text())
    assert beside["quantization"]["kv_cache_quant_algo"] == "FP8"
    for fmt in ALL:
        sidecar = json.loads((made.path / fmt / "kv_cache_scales.tp2.json").read_text())
        factors = sidecar["kv_cache"]["scaling_factor"]
        assert sidecar["model_type"] == "llama" and factors["0"] == factors["1"]
        largest = {str(each["block"]): max(each["k"], each["v"]) for each in found.values()}
        assert factors["0"] == pytest.approx(largest)


def test_the_cost_of_the_cache_is_measured_with_the_artifacts_scales(made: Any) -> None:
    costs = {fmt: perplexity(made.path / fmt, kv_cache="fp8", window=32, max_tokens=200).kv_cache for fmt in ALL}

    assert {fmt: cost.scales for fmt, cost in costs.items() if cost} == {
        "compressed-tensors": "artifact",
        "gptq": "sidecar",
        "awq": "sidecar",
        "modelopt": "artifact",
    }
    assert all(abs(cost.difference) < 0.05 for cost in costs.values() if cost)


def test_each_record_speaks_of_its_own_artifact(made: Any) -> None:
    for fmt in ALL:
        record = json.loads((made.path / fmt / "quantkit.json").read_text())
        assert record["format"] == fmt and record["output"]["sha256"] == digests(made.path / fmt)
    assert list(made.record.to_json()["outputs"]) == list(ALL)


@pytest.mark.parametrize("fmt", ["compressed-tensors", "modelopt"])
def test_a_cache_alone_leaves_every_weight_as_it_is(
    zoo: Callable[..., Path], calibration: Path, tmp_path: Path, fmt: str
) -> None:
    source = zoo("llama")
    recipe = Recipe(method="none", kv_cache="fp8", format=(fmt,), calibration=str(calibration), samples=8, seq_len=20)

    record = quantize(recipe, str(source), tmp_path / "out")

    before, after = read_all(source), read_all(tmp_path / "out")
    added = {name for name in after if name.endswith(("k_scale", "v_scale"))}
    assert set(after) == set(before) | added and len(added) == 4
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert record.linears == {} and len(record.cache) == 2
    cost = perplexity(tmp_path / "out", kv_cache="fp8", window=32, max_tokens=200).kv_cache
    assert cost is not None and cost.scales == "artifact"
    # the model still loads, and is the source's
    with torch.no_grad():
        ids = torch.arange(12)[None] + 4
        models = [quantkit.load(path, "cpu", dtype=torch.float32) for path in (source, tmp_path / "out")]
        assert torch.equal(models[0](ids).logits, models[1](ids).logits)


@pytest.mark.parametrize("fmt", ["gptq", "awq"])
def test_a_cache_alone_needs_a_format_with_a_place_for_it(zoo: Callable[..., Path], tmp_path: Path, fmt: str) -> None:
    with pytest.raises(UsageError, match=f"`{fmt}` checkpoints hold no scales of a KV cache") as caught:
        quantize(Recipe(method="none", kv_cache="fp8", format=(fmt,)), str(zoo("llama")), tmp_path / "out")

    assert caught.value.hint == "choose `--format` from compressed-tensors, modelopt"


def test_what_fails_its_verification_is_not_kept(
    zoo: Callable[..., Path], calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packer that damages the last of several formats leaves nothing of any."""
    fmt = FORMATS["awq"]
    pack = type(fmt).pack

    def damaged(self: Any, name: str, q: Any) -> dict[str, torch.Tensor]:
        tensors = pack(self, name, q)
        if name.endswith("layers.1.mlp.down_proj"):
            tensors[f"{name}.scales"] = torch.full_like(tensors[f"{name}.scales"], torch.nan)
        return tensors

    monkeypatch.setattr(type(fmt), "pack", damaged)
    recipe = Recipe(method="rtn", group_size=32, format=("gptq", "awq"), calibration=str(calibration), samples=8)

    with pytest.raises(CheckpointError, match=r"failed its verification \(scales\).*layers\.1\.mlp\.down_proj"):
        quantize(recipe, str(zoo("llama")), tmp_path / "out")

    assert list(tmp_path.iterdir()) == []


def test_a_format_that_cannot_hold_the_scheme_refuses_before_a_weight_is_read(
    zoo: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.pipeline.build_skeleton", lambda *_, **__: pytest.fail("work has begun"))
    for changes, reason in (
        ({"format": ("compressed-tensors", "modelopt"), "symmetric": False}, "modelopt"),
        ({"format": ("awq",), "bits": 8}, "8"),
    ):
        with pytest.raises(QuantkitError) as caught:
            quantize(Recipe(group_size=32, **changes), str(zoo("llama")), tmp_path / "out")
        assert reason in f"{caught.value.message} {caught.value.hint}" and caught.value.hint
