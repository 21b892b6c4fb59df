"""Read artifacts without quantkit: an unpacker in numpy, a twin model that holds what it finds, digests of files."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from zoo.models import full_model


def read_all(path: Path) -> dict[str, Tensor]:
    """Every tensor of a directory, by name."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found = load_file(file)
        assert not tensors.keys() & found.keys()
        tensors |= found
    return tensors


def read_config(path: Path) -> dict[str, Any]:
    """config.json."""
    return json.loads((path / "config.json").read_text())  # type: ignore[no-any-return]


def fields(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes int64 [R, W * 32 / bits] of words [R, W], the first code in the lowest bits."""
    packed = np.ascontiguousarray(packed).view(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return ((packed[:, :, None] >> shifts) & np.uint32(2**bits - 1)).astype(np.int64).reshape(len(packed), -1)


def unpack(tensors: dict[str, Tensor], linear: str, bits: int) -> np.ndarray:
    """The weight float32 [N, K] of a packed linear, (code - zero) * scale."""
    n, k = tensors[f"{linear}.weight_shape"].tolist()
    codes = fields(tensors[f"{linear}.weight_packed"].numpy(), bits)[:, :k]
    scale = tensors[f"{linear}.weight_scale"].float().numpy()
    if f"{linear}.weight_zero_point" in tensors:
        zero = fields(tensors[f"{linear}.weight_zero_point"].numpy().T, bits)[:, :n].T
    else:
        zero = np.full(scale.shape, 2 ** (bits - 1))
    group = k // scale.shape[1]
    return (codes - zero.repeat(group, axis=1)).astype(np.float32) * scale.repeat(group, axis=1)


def bits_of(config: dict[str, Any], linear: str) -> int:
    """Width of a code, by the config's targets."""
    groups = config["quantization_config"]["config_groups"].values()
    for group in groups:
        for target in group["targets"]:
            regex = target.removeprefix("re:") if target.startswith("re:") else None
            if target == linear or (regex and re.match(regex, linear)):
                return int(group["weights"]["num_bits"])
    return next(int(group["weights"]["num_bits"]) for group in groups if "Linear" in group["targets"])


def packed_linears(tensors: dict[str, Tensor]) -> list[str]:
    """Names of the packed linears, sorted."""
    return sorted(name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed"))


def dequantized(path: Path) -> dict[str, Tensor]:
    """All tensors of an artifact by the plain model's names, the packed ones in float32."""
    tensors, config = read_all(path), read_config(path)
    packed = packed_linears(tensors)
    owned = {f"{linear}.{leaf}" for linear in packed for leaf in ("packed", "scale", "shape", "zero_point")}
    plain = {name: t for name, t in tensors.items() if name.replace(".weight_", ".") not in owned}
    return plain | {
        f"{linear}.weight": torch.from_numpy(unpack(tensors, linear, bits_of(config, linear))) for linear in packed
    }


def twin(artifact: Path, path: Path) -> Any:
    """The artifact's weights as a plain float32 checkpoint in `path`, loaded by transformers."""
    path.mkdir()
    config = read_config(artifact)
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    tensors = {name: t.float().contiguous() for name, t in dequantized(artifact).items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return full_model(path)


def same_bytes(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have dtype, shape and bytes in common."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return (
        left.contiguous().view(torch.uint8).numpy().tobytes() == right.contiguous().view(torch.uint8).numpy().tobytes()
    )


def changed(source: Path, artifact: Path) -> set[str]:
    """Names of the source's tensors whose bytes are not in the artifact under the same name."""
    before, after = read_all(source), read_all(artifact)
    return {name for name, t in before.items() if name not in after or not same_bytes(t, after[name])}


def digests(path: Path) -> dict[str, str]:
    """sha256 of every safetensors file."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.glob("*.safetensors"))}
