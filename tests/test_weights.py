"""Weights by the names of the plain model, packed or not; and a model that runs from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from zoo.artifacts import dequantized, read_all, read_config
from zoo.models import full_model, rows

import quantkit
from quantkit.errors import CheckpointError, ResourceError
from quantkit.inspection import inspect
from quantkit.weights import WeightSource

Zoo = Callable[..., Path]
Make = Callable[..., Any]


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_packed_directory_reads_like_a_plain_one(make_artifact: Make, symmetric: bool) -> None:
    made = make_artifact("llama", method="rtn", symmetric=symmetric)

    source = WeightSource.open(made.path)

    expected = dequantized(made.path)
    assert list(source.tensors) == sorted(expected) == sorted(read_all(made.source))
    found = source.read(source.tensors, torch.float32)
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in expected.items())
    assert {t.dtype for t in source.read(source.tensors).values()} == {torch.float16}
    assert set(source.schemes) == {
        name.removesuffix(".weight") for name, info in source.tensors.items() if info is None
    }


def test_a_plain_directory_is_read_as_it_is(zoo: Zoo) -> None:
    source = WeightSource.open(zoo("llama"))

    assert source.format is None and source.schemes == {}
    assert all(torch.equal(t, source.read([name])[name]) for name, t in read_all(zoo("llama")).items())


@pytest.mark.parametrize("architecture", ["llama", "gemma", "opt", "bloom"])
def test_a_plain_checkpoint_loads_as_transformers_loads_it(zoo: Zoo, architecture: str) -> None:
    ids = torch.stack(rows(12))
    model = quantkit.load(zoo(architecture), "cpu", dtype=torch.float32)

    with torch.no_grad():
        assert torch.equal(model(ids).logits, full_model(zoo(architecture))(ids).logits)
    assert not model.training and not any(p.requires_grad for p in model.parameters())


def test_a_loaded_artifact_generates(make_artifact: Make) -> None:
    model = quantkit.load(make_artifact("llama", method="gptq").path, "cpu")

    out = model.generate(torch.stack(rows(6)), max_new_tokens=4, min_new_tokens=4, do_sample=False)

    assert out.shape == (1, 10)
    assert {p.dtype for p in model.parameters()} == {torch.float16}


@dataclass(frozen=True)
class Spot:
    """Stands in for an artifact made alone."""

    path: Path


def spoiled(made: Any, to: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    shutil.copytree(made.path, to)
    tensors, config = load_file(to / "model.safetensors"), read_config(to)
    change(tensors, config)
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(config))
    return to


K0 = "model.layers.0.self_attn.k_proj"


FOUR = ["compressed-tensors", "gptq", "awq", "modelopt"]


@pytest.mark.parametrize("fmt", FOUR)
def test_every_format_reads_the_same(make_artifact: Make, fmt: str) -> None:
    made = make_artifact("llama", method="rtn", format=FOUR, kv_cache="fp8")
    expected = dequantized(made.path / "compressed-tensors")
    scales = {name for name in expected if name.endswith(("k_scale", "v_scale"))}

    source = WeightSource.open(made.path / fmt)

    assert source.format is not None and source.format.name == fmt and source.dtype == "F16"
    assert list(source.tensors) == sorted(read_all(made.source)) == sorted(expected.keys() - scales)
    found = source.read(source.tensors, torch.float32)
    assert all(torch.equal(tensor, expected[name].float()) for name, tensor in found.items())
    assert {linear: source.shape(linear) for linear in source.schemes} == {
        name.removesuffix(".weight"): tuple(t.shape) for name, t in found.items() if name.endswith("_proj.weight")
    }
    assert {source.scale_dtype(linear) for linear in source.schemes} == {"F16"}


@pytest.mark.parametrize("fmt", ["compressed-tensors", "modelopt", "awq"])
def test_scales_of_a_cache_have_one_owner_in_every_spelling(make_artifact: Make, fmt: str) -> None:
    made = make_artifact("llama", method="rtn", format=FOUR, kv_cache="fp8")
    tensors = read_all(made.path / "compressed-tensors")

    found = WeightSource.open(made.path / fmt).cache_scales()

    wanted = {
        f"model.layers.{i}.self_attn": tuple(
            tensors[f"model.layers.{i}.self_attn.{which}_scale"].item() for which in "kv"
        )
        for i in range(2)
    }
    assert {name: (each.k, each.v) for name, each in found.items()} == (wanted if fmt != "awq" else {})


@pytest.mark.parametrize("fmt", FOUR)
def test_an_outline_is_a_linear_without_its_codes(make_artifact: Make, fmt: str) -> None:
    made = make_artifact("llama", method="rtn", format=FOUR, kv_cache="fp8")
    source = WeightSource.open(made.path / fmt)

    for linear in source.schemes:
        whole, outline = source.quantized(linear), source.outline(linear)
        assert outline.codes.is_meta and outline.codes.shape == whole.codes.shape
        assert outline.codes.dtype == whole.codes.dtype and outline.scheme == whole.scheme
        assert torch.equal(outline.scale, whole.scale) and torch.equal(outline.zero_point, whole.zero_point)


@pytest.mark.parametrize(
    ("fmt", "file", "content"),
    [
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
        ("modelopt", "hf_quant_config.json", {"quantization": {"quant_algo": "W4A16_AWQ", "group_size": 32}}),
    ],
)
def test_a_config_may_lie_in_a_file_of_its_own(
    make_artifact: Make, tmp_path: Path, fmt: str, file: str, content: dict[str, Any]
) -> None:
    made = make_artifact("llama", method="rtn", format=FOUR, kv_cache="fp8")
    shutil.copytree(made.path / fmt, tmp_path / "m")
    config = read_config(tmp_path / "m")
    del config["quantization_config"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    (tmp_path / "m" / file).write_text(json.dumps(content))

    source, whole = WeightSource.open(tmp_path / "m"), WeightSource.open(made.path / fmt)

    assert source.schemes == whole.schemes and len(source.schemes) == 14
    assert source.config == {"quant_method": fmt} | content
    assert torch.equal(source.quantized(K0).codes, whole.quantized(K0).codes)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_of_a_cache_that_is_none_is_refused(make_artifact: Make, tmp_path: Path, value: float) -> None:
    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        tensors["model.layers.1.self_attn.v_scale"] = torch.tensor([value])

    made = make_artifact("llama", method="rtn", format=FOUR, kv_cache="fp8")
    path = spoiled(Spot(made.path / "compressed-tensors"), tmp_path / "m", change)

    with pytest.raises(CheckpointError, match=r"`model.layers.1.self_attn.v_scale` is .*, which is no scale"):
        WeightSource.open(path).cache_scales()


def test_a_cache_with_half_its_scales_is_refused(make_artifact: Make, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        del tensors["model.layers.1.self_attn.v_scale"]

    def per_head(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(2)

    made = Spot(make_artifact("llama", method="rtn", format=FOUR, kv_cache="fp8").path / "compressed-tensors")

    with pytest.raises(CheckpointError, match=r"`model.layers.1.self_attn` has no scale for V of its KV cache"):
        WeightSource.open(spoiled(made, tmp_path / "a", change)).cache_scales()
    with pytest.raises(CheckpointError, match=r"k_scale` is \[2\], and only one scale for all heads is read"):
        WeightSource.open(spoiled(made, tmp_path / "b", per_head)).cache_scales()


def test_a_part_that_another_format_owns_is_not_overlooked(make_artifact: Make, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        tensors[f"{K0}.weight_g_idx"] = torch.zeros(64, dtype=torch.int32)

    with pytest.raises(CheckpointError, match=f"`{K0}.weight_g_idx` changes what the linear computes"):
        WeightSource.open(spoiled(make_artifact("llama", method="rtn"), tmp_path / "m", change))


def other_method(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["quantization_config"]["quant_method"] = "fp8"


def no_scheme(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:.*_proj$"]
    config["quantization_config"]["ignore"].append(K0)


def no_scale(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    del tensors[f"{K0}.weight_scale"]


def other_group(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64


def other_linear(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    for leaf in ("weight_packed", "weight_scale", "weight_shape"):
        tensors[f"{K0}.{leaf}"] = tensors[f"{K0.replace('k_proj', 'q_proj')}.{leaf}"].clone()


def twice(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    tensors[f"{K0}.weight"] = torch.zeros(32, 64)


def text_for_config(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["quantization_config"] = "4bit"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_method, "is quantized as `fp8`"),
        (no_scheme, f"`{K0}` is packed, but `quantization_config` gives it no scheme"),
        (no_scale, f"`{K0}.weight_scale` is missing"),
        (other_group, r"weight_scale` is float16 \[.*\], and the scheme asks for"),
        (twice, f"`{K0}` is in .* both packed and as"),
        (text_for_config, "is quantized as `4bit`"),
        (other_linear, rf"`{K0}.weight` is \[64, 64\], and the model has \[32, 64\]"),
    ],
)
def test_an_artifact_that_contradicts_itself_is_refused(
    make_artifact: Make, tmp_path: Path, change: Callable[..., None], message: str
) -> None:
    path = spoiled(make_artifact("llama", method="rtn"), tmp_path / "m", change)

    for read in (partial(quantkit.load, device="cpu"), partial(quantkit.perplexity, device="cpu"), inspect):
        with pytest.raises(CheckpointError, match=message) as refused:
            read(path)
        assert refused.value.hint


def test_a_device_that_is_not_there_is_refused(zoo: Zoo) -> None:
    with pytest.raises(ResourceError, match="cuda:97"):
        quantkit.load(zoo("llama"), "cuda:97")
