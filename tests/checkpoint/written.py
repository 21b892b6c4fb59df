"""Write an artifact with quantkit and read it back with the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from quantkit.checkpoint.dtypes import DTYPE_NAMES
from quantkit.checkpoint.output import OutputDirectory
from quantkit.checkpoint.writer import ArtifactWriter, TensorSpec


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]


@contextmanager
def writing(out: Path, specs: Iterable[TensorSpec], shard: int = 2**30, **options: Any) -> Iterator[ArtifactWriter]:
    """A writer for an output directory, which is committed on leaving."""
    with OutputDirectory(out, **options) as output:
        writer = output.writer(specs, shard)
        yield writer
        writer.seal()
        output.commit()


def write_model(out: Path, tensors: dict[str, torch.Tensor], shard: int = 2**30, **options: Any) -> Path:
    with writing(out, specs_of(tensors), shard, **options) as writer:
        writer.add_file("config.json", "{}")
        writer.write(tensors)
    return out


def load(out: Path) -> dict[str, torch.Tensor]:
    """Everything in a directory, through the safetensors library and the index."""
    index = out / "model.safetensors.index.json"
    if not index.exists():
        return load_file(out / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    assert list(weight_map) == sorted(weight_map)
    shards = {file: load_file(out / file) for file in set(weight_map.values())}
    assert sum(map(len, shards.values())) == len(weight_map)
    return {name: shards[file][name] for name, file in weight_map.items()}
