"""Make checkpoint directories and deliberately broken files. Imports nothing from quantkit."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


def raw_file(header: object, data: bytes = b"") -> bytes:
    """Bytes of a safetensors file with any header: an object, JSON text, or raw bytes."""
    text = header if isinstance(header, bytes) else header if isinstance(header, str) else json.dumps(header)
    raw = text if isinstance(text, bytes) else text.encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    """One entry of a header; two float32 numbers unless said otherwise."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def weights(seed: int = 0) -> dict[str, Tensor]:
    """A few tensors of several dtypes and shapes, a scalar and an empty one among them."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed.weight": torch.randn(32, 8, generator=generator).bfloat16(),
        "model.layers.0.mlp.weight": torch.randn(8, 16, generator=generator).half(),
        "model.layers.1.mlp.weight": torch.randn(8, 16, generator=generator).half(),
        "model.layers.10.mlp.weight": torch.randn(8, 16, generator=generator),
        "model.norm.weight": torch.ones(8),
        "model.position_ids": torch.arange(5)[None],
        "model.scalar": torch.tensor(2.5),
        "model.nothing": torch.empty(0, 4),
    }


def model_dir(path: Path, *shards: dict[str, Tensor], config: object = None) -> Path:
    """Write a checkpoint directory: one file, or several with an index."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "toy"} if config is None else config))
    if len(shards) == 1:
        save_file(shards[0], path / "model.safetensors", metadata={"format": "pt"})
        return path
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path / file)
        weight_map |= dict.fromkeys(shard, file)
    write_index(path, weight_map)
    return path


def write_index(path: Path, weight_map: object) -> None:
    """Write (or replace) the index of a directory."""
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def split(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Distribute tensors over two shards, alternating."""
    names = list(tensors)
    return {name: tensors[name] for name in names[::2]}, {name: tensors[name] for name in names[1::2]}


def listing(path: Path) -> dict[str, bytes]:
    """Every file below a directory with its content."""
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have dtype, shape and bytes in common."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
