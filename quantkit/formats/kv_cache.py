"""Scales of an FP8 KV cache outside of any one format: whose a tensor is, and SGLang's file. Imports no torch.

An engine stores x as e4m3(x / scale) and reads it back times scale; the scale is amax / 448, one for K and one for V.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

E4M3_MAX = 448.0
SGLANG_TP = (1, 2, 4, 8)  # tensor-parallel sizes that get a file each
_SUFFIXES = {"k_scale": ("k", "k_proj"), "v_scale": ("v", "v_proj")}


@dataclass(frozen=True, slots=True)
class CacheScales:
    """Scales of one attention module, positive and finite."""

    k: float
    v: float


def cache_scale_owner(name: str) -> tuple[str, str] | None:
    """Read a tensor's name as (attention module, "k" or "v"); None where it is no scale of a KV cache.

    Both spellings are read: `self_attn.k_scale` (compressed-tensors) and `self_attn.k_proj.k_scale` (ModelOpt).
    """
    owner, _, leaf = name.rpartition(".")
    if not owner or leaf not in _SUFFIXES:
        return None
    which, projection = _SUFFIXES[leaf]
    return owner.removesuffix(f".{projection}"), which


def sglang_files(model_type: str, scales: Mapping[int, CacheScales]) -> dict[str, dict[str, Any]]:
    """Write the files that SGLang takes as `--quantization-param-path`: {name: content}, one per tensor-parallel size.

    Its reader wants as many rank keys as ranks, every layer in each, and has one factor for both K and V.

    Args:
        scales: {layer number: scales} of all layers.
    """
    factors = {str(layer): max(each.k, each.v) for layer, each in sorted(scales.items())}
    return {
        f"kv_cache_scales.tp{size}.json": {
            "model_type": model_type,
            "kv_cache": {
                "dtype": "float8_e4m3fn",
                "scaling_factor": {str(rank): factors for rank in range(size)},
            },
        }
        for size in SGLANG_TP
    }
