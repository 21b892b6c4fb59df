"""A reader of artifacts that shares no code with quantkit: numpy, json, and the layouts as their specifications say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_NUMPY = {
    "F16": np.float16,
    "BF16": np.uint16,
    "F32": np.float32,
    "I32": np.int32,
    "I64": np.int64,
    "U8": np.uint8,
}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a file by name; bfloat16 comes as float32 of the same values."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, info in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, last = info["data_offsets"]
            flat = np.frombuffer(data[start + first : start + last], dtype=_NUMPY[info["dtype"]])
            if info["dtype"] == "BF16":
                flat = (flat.astype(np.uint32) << np.uint32(16)).view(np.float32)
            tensors[name] = flat.reshape(info["shape"])
    return tensors


def dequantize(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], linear: str) -> np.ndarray:
    """The weight float32 [N, K] of a packed linear, as its `quantization_config` says it is packed."""
    own = {name.removeprefix(f"{linear}."): array for name, array in tensors.items() if name.startswith(f"{linear}.")}
    return _READERS[config["quant_method"]](own, config)


def _compressed_tensors(own: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> np.ndarray:
    rows, columns = own["weight_shape"].tolist()
    bits = _bits(own["weight_packed"].shape[1], columns)
    middle = 2 ** (bits - 1)
    signed = _fields(own["weight_packed"], bits)[:, :columns] - middle
    zero = np.zeros(own["weight_scale"].shape, dtype=np.int64)
    if "weight_zero_point" in own:
        zero = _fields(own["weight_zero_point"].T, bits)[:, :rows].T - middle
    return _affine(signed, own["weight_scale"], zero)


def _gptq(own: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> np.ndarray:
    index = own["g_idx"]
    bits = _bits(own["qweight"].shape[0], len(index))
    codes = _fields(own["qweight"].T, bits)[:, : len(index)]
    offset = {"gptq": 1, "gptq_v2": 0}[config.get("checkpoint_format", "gptq")]
    zero = _fields(own["qzeros"], bits)[:, : len(codes)] + offset  # not masked: a field cannot say more
    return (codes - zero.T[:, index]).astype(np.float32) * own["scales"].astype(np.float32).T[:, index]


def _awq(own: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> np.ndarray:
    def features(packed: np.ndarray) -> np.ndarray:  # [M, W] -> [8 W, M]
        found = np.empty((8 * packed.shape[1], packed.shape[0]), dtype=np.int64)
        fields = _fields(packed, 4)
        for word in range(packed.shape[1]):
            for field, feature in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                found[8 * word + feature] = fields[:, 8 * word + field]
        return found

    return _affine(features(own["qweight"]), own["scales"].T, features(own["qzeros"]))


def _modelopt(own: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> np.ndarray:
    pairs = own["weight"].astype(np.int64)
    nibbles = np.stack([pairs % 16, pairs // 16], axis=1).reshape(-1, pairs.shape[1])
    signed = np.where(nibbles < 8, nibbles, nibbles - 16)
    scaled = _affine(signed, own["weight_scale"], np.zeros(own["weight_scale"].shape, dtype=np.int64))
    return scaled * own["pre_quant_scale"].astype(np.float32)


_READERS = {"compressed-tensors": _compressed_tensors, "gptq": _gptq, "awq": _awq, "modelopt": _modelopt}


def _bits(packed: int, codes: int) -> int:
    """Width of a code; `codes` of them lie in `packed` words."""
    return 4 if packed == -(-codes // 8) else 8


def _fields(packed: np.ndarray, bits: int) -> np.ndarray:
    """Fields int64 [R, 32 / bits * W] of words [R, W], the lowest bits first."""
    unsigned = np.ascontiguousarray(packed).view(np.uint32).astype(np.int64)
    parts = [(unsigned >> shift) % 2**bits for shift in range(0, 32, bits)]
    return np.stack(parts, axis=2).reshape(len(packed), -1)


def _affine(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    group = codes.shape[1] // scale.shape[1]
    spread = scale.astype(np.float32).repeat(group, axis=1)
    return (codes - zero.repeat(group, axis=1)).astype(np.float32) * spread
