"""transformers and compressed-tensors load the artifact by their own code and compute what quantkit.load computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from zoo.artifacts import read_config
from zoo.models import rows

import quantkit

pytest.importorskip("compressed_tensors")
Make = Callable[..., Any]
IDS = torch.stack(rows(18, 18, seed=7))


@torch.no_grad()
def client_logits(path: Path, *, dequantize: bool = False) -> torch.Tensor:
    from transformers import CompressedTensorsConfig

    options: dict[str, Any] = {}
    if dequantize:
        stored = read_config(path)["quantization_config"]
        known = {key: value for key, value in stored.items() if key in ("config_groups", "ignore", "format")}
        options["quantization_config"] = CompressedTensorsConfig(**known, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True, **options).eval()
    return model(IDS, use_cache=False).logits  # type: ignore[no-any-return]


@torch.no_grad()
def our_logits(path: Path, dtype: torch.dtype | None = torch.float32) -> torch.Tensor:
    model = quantkit.load(path, "cpu", dtype=dtype).float()
    return model(IDS, use_cache=False).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "phi3", "opt", "cohere2"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_symmetric_artifact(make_artifact: Make, architecture: str, method: str) -> None:
    path = make_artifact(architecture, method=method).path

    torch.testing.assert_close(client_logits(path), our_logits(path), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_an_asymmetric_artifact(make_artifact: Make, architecture: str) -> None:
    # compressed-tensors 0.18 to 0.20 expects unpacked zero points unless it may dequantize while loading, which it does
    # to the dtype of the scales
    path = make_artifact(architecture, method="awq", symmetric=False).path

    torch.testing.assert_close(client_logits(path, dequantize=True), our_logits(path, None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "recipe",
    [
        {"override": ["down_proj: bits=8,group_size=16", "layers.1.self_attn: group_size=16"]},
        {"ignore": ["o_proj", "layers.0.mlp"]},
        {"group_size": -1},
        {"bits": 8, "group_size": -1},
    ],
    ids=str,
)
def test_mixed_schemes_and_ignored_linears(make_artifact: Make, recipe: dict[str, Any]) -> None:
    path = make_artifact("qwen2", method="gptq", **recipe).path

    torch.testing.assert_close(client_logits(path), our_logits(path), rtol=1e-4, atol=1e-5)
