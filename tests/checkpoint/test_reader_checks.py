"""Non-finite values and quantized sources are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quantkit.checkpoint.reader import Checkpoint, check_finite, require_quantizable
from quantkit.errors import CheckpointError

from .fabricate import model_dir, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", [0, 16, 1000, 1025])
def test_one_bad_value_is_found_anywhere(dtype: torch.dtype, value: float, at: int) -> None:
    tensor = torch.ones(1026, dtype=dtype)
    check_finite("w", tensor.reshape(27, 38), "x.safetensors")
    tensor[at] = value
    with pytest.raises(CheckpointError, match=r"`w` in `x\.safetensors` holds") as caught:
        check_finite("w", tensor.reshape(27, 38), "x.safetensors")
    assert ("1 NaN and 0 inf" if value != value else "0 NaN and 1 inf") in caught.value.message


def test_finite_passes_for_extremes_integers_and_nothing() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        limits = torch.finfo(dtype)
        check_finite("w", torch.tensor([limits.min, limits.max, limits.tiny, 0.0]).to(dtype))
    check_finite("w", torch.tensor([2**31 - 1], dtype=torch.int32))
    check_finite("w", torch.empty(0, 3))


def quantizable(path: Path, tensors: dict[str, torch.Tensor], config: object = None) -> None:
    require_quantizable(Checkpoint.open(model_dir(path, tensors, config=config)))


def test_plain_weights_are_quantizable(tmp_path: Path) -> None:
    extra = {"attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8), "inv_freq": torch.ones(4, dtype=torch.float64)}
    quantizable(tmp_path / "a", weights() | extra, config={"quantization_config": None})


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantized_config_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"`{key}` \\(gptq\\)"):
        quantizable(tmp_path / "a", weights(), {key: {"quant_method": "gptq", "bits": 4}})
    with pytest.raises(CheckpointError, match=f"`text_config.{key}`"):
        quantizable(tmp_path / "b", weights(), {"text_config": {key: {"bits": 4}}})


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("l.qweight", torch.zeros(4, 4, dtype=torch.int32)),
        ("l.weight_packed", torch.zeros(4, 4, dtype=torch.int32)),
        ("l.weight_scale", torch.zeros(4, 1)),
        ("l.weight_scale_inv", torch.zeros(1, 1)),
        ("l.weight.absmax", torch.zeros(4)),
        ("l.weight", torch.zeros(8, 1, dtype=torch.uint8)),
        ("l.codes", torch.zeros(8, 2, dtype=torch.int32)),
        ("experts.gate_up_proj_blocks", torch.zeros(2, 2, 2, 2, dtype=torch.uint8)),
        ("l.weight", torch.zeros(4, 4).to(torch.float8_e4m3fn)),
        ("l.weight", torch.zeros(4, 4, dtype=torch.float64)),
    ],
)
def test_packed_or_odd_weights_are_refused_by_name(tmp_path: Path, name: str, tensor: torch.Tensor) -> None:
    with pytest.raises(CheckpointError) as caught:
        quantizable(tmp_path / "a", weights() | {name: tensor})
    assert f"`{name}` in `model.safetensors`" in caught.value.message
    assert "original" in caught.value.hint


def test_nothing_to_quantize(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weight matrix"):
        quantizable(tmp_path / "a", {"norm.weight": torch.ones(3)})
