"""Weights by the names of the plain model, packed or not; and a model that runs from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
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


def spoiled(made: Any, to: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    shutil.copytree(made.path, to)
    tensors, config = load_file(to / "model.safetensors"), read_config(to)
    change(tensors, config)
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(config))
    return to


K0 = "model.layers.0.self_attn.k_proj"


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
