"""ModelOpt: golden bytes, the two shapes of its config, and what it has no place for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from samples import random_weight

from quantkit import __version__
from quantkit.errors import CheckpointError, UnsupportedScheme
from quantkit.formats import FORMATS
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import PER_CHANNEL, Scheme

FORMAT = FORMATS["modelopt"]
UP, DOWN = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"


def test_the_bytes_of_a_small_weight() -> None:
    q = QuantizedWeight(
        codes=torch.tensor([[0, 7, 8, 15], [8, 9, 1, 0]], dtype=torch.uint8),  # -8 -1 0 7 and 0 1 -7 -8
        scale=torch.tensor([[0.5, 2.0], [1.0, 4.0]], dtype=torch.bfloat16),
        zero_point=torch.full((2, 2), 8, dtype=torch.uint8),
        scheme=Scheme(4, 2),
    )

    tensors = FORMAT.pack("m", q)

    assert tensors["m.weight"].tolist() == [[0x08, 0x1F, 0x90, 0x87]]
    assert tensors["m.weight_scale"].tolist() == [[0.5, 2.0], [1.0, 4.0]]
    assert tensors["m.pre_quant_scale"].tolist() == [1.0] * 4
    assert {t.dtype for t in tensors.values()} == {torch.uint8, torch.bfloat16}


@pytest.mark.parametrize(
    ("scheme", "shape", "message"),
    [
        (Scheme(8, 32), (64, 64), "8-bit codes have no place in `modelopt`"),
        (Scheme(4, 32, symmetric=False), (64, 64), "`modelopt` has no zero points"),
        (Scheme(4, PER_CHANNEL), (64, 64), "TensorRT-LLM reads groups only"),
        (Scheme(4, 32), (63, 64), "63 output features are not a multiple of 2"),
    ],
)
def test_what_has_no_place_is_refused(scheme: Scheme, shape: tuple[int, int], message: str) -> None:
    with pytest.raises(UnsupportedScheme, match=message):
        FORMAT.check(scheme, shape, least_zero=8)
    with pytest.raises(UnsupportedScheme, match=message):
        FORMAT.pack("x", random_weight(scheme, *shape))


def test_the_config_and_the_file_beside_it() -> None:
    config = FORMAT.config({UP: Scheme(4, 64), DOWN: None}, fp8_cache=True)

    assert config == {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_AWQ",
        "group_size": 64,
        "has_zero_point": False,
        "pre_quant_scale": True,
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "ignore": [DOWN, "lm_head"],
        "producer": {"name": "quantkit", "version": __version__},
    }
    assert FORMAT.files(config) == {
        "hf_quant_config.json": {
            "producer": {"name": "quantkit", "version": __version__},
            "quantization": {
                "quant_algo": "W4A16_AWQ",
                "group_size": 64,
                "has_zero_point": False,
                "pre_quant_scale": True,
                "kv_cache_quant_algo": "FP8",
                "exclude_modules": [DOWN, "lm_head"],
            },
        }
    }


def test_without_scales_of_a_cache_none_are_announced() -> None:
    config = FORMAT.config({UP: Scheme(4, 64)})

    assert "kv_cache_scheme" not in config
    assert FORMAT.files(config)["hf_quant_config.json"]["quantization"]["kv_cache_quant_algo"] is None


def test_a_cache_alone_is_described() -> None:
    config = FORMAT.config({UP: None}, fp8_cache=True)
    quantization = FORMAT.files(config)["hf_quant_config.json"]["quantization"]

    assert config["quant_algo"] is None
    assert quantization == {
        "quant_algo": None,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": [UP, "lm_head"],
    }
    assert FORMAT.scheme_of(config)(UP) is None


def test_the_scales_of_a_cache_stand_beside_their_projections() -> None:
    assert FORMAT.cache_specs("a.self_attn") == {
        "a.self_attn.k_proj.k_scale": ("F32", ()),
        "a.self_attn.v_proj.v_scale": ("F32", ()),
    }


def test_several_schemes_cannot_be_said() -> None:
    with pytest.raises(UnsupportedScheme, match="one scheme for all linears, and these have 2"):
        FORMAT.config({UP: Scheme(), DOWN: Scheme(4, 64)})


def other(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 128} | changes


@pytest.mark.parametrize("key", ["ignore", "exclude_modules"])
@pytest.mark.parametrize("nested", [False, True])
def test_both_shapes_and_patterns_are_read(key: str, nested: bool) -> None:
    patterns = ["lm_head", "model.layers.0*", "*.mlp.gate", "model.vision"]
    config = other(**{key: patterns})
    if nested:
        config = {"quant_method": "modelopt", "quantization": config}

    scheme_of = FORMAT.scheme_of(config)

    assert scheme_of(UP) == Scheme(4, 128)
    assert scheme_of("model.layers.0.mlp.up_proj") is None
    assert scheme_of("model.layers.1.mlp.gate") is None
    assert scheme_of("model.layers.1.mlp.gate_proj") == Scheme(4, 128)
    assert scheme_of("model.vision.blocks.0.fc1") is None
    assert scheme_of("model.visionary.fc1") == Scheme(4, 128)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (other(quant_algo="NVFP4"), "ModelOpt `NVFP4` cannot be read"),
        (other(quant_algo="MIXED_PRECISION"), "ModelOpt `MIXED_PRECISION` cannot be read"),
        (other(quant_algo=None, quantized_layers={"x": {}}), "ModelOpt `None` cannot be read"),
        (other(has_zero_point=True), "ModelOpt zero points cannot be read"),
        (other(group_size=None), "`group_size` is None, not a number"),
        (other(ignore="lm_head"), "not a list"),
        (other(quantization=["x"]), "`quantization` is .*, not a dict"),
        (other(quant_method="gptq"), "quant_method `gptq` is not modelopt"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        FORMAT.scheme_of(config)


def test_scaled_inputs_are_refused_and_their_absence_is_not() -> None:
    q = random_weight(Scheme(4, 8), 8, 16)
    tensors = FORMAT.pack("x", q)
    scaled = tensors | {"x.pre_quant_scale": torch.linspace(0.5, 1, 16)}
    del tensors["x.pre_quant_scale"]

    assert torch.equal(FORMAT.unpack("x", tensors, q.scheme).codes, q.codes)
    with pytest.raises(CheckpointError, match=r"`x\.pre_quant_scale` scales the inputs"):
        FORMAT.unpack("x", scaled, q.scheme)
