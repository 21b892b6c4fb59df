"""Whatever the names, dtypes, shapes and shard size: the safetensors library reads what was laid out."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.checkpoint.dtypes import TORCH_DTYPES
from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import TensorSpec, lay_out
from quantkit.errors import CheckpointError, UsageError

from .fabricate import listing, same
from .written import load, writing

names = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), max_size=12)
shapes = st.lists(st.integers(0, 3), max_size=5).map(tuple)
some_specs = st.lists(
    st.builds(
        TensorSpec, names.filter(lambda name: name != "__metadata__"), st.sampled_from(sorted(TORCH_DTYPES)), shapes
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda spec: spec.name,
)


def filled(spec: TensorSpec) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(spec.name))
    data = torch.randint(0, 2 if spec.dtype == "BOOL" else 256, (spec.nbytes,), dtype=torch.uint8, generator=generator)
    return data.view(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)


@settings(max_examples=60, deadline=None)
@given(some_specs, st.integers(1, 300), st.randoms())
def test_library_reads_what_was_written(specs: list[TensorSpec], shard: int, rng: object) -> None:
    tensors = {spec.name: filled(spec) for spec in specs}
    order = list(tensors)
    rng.shuffle(order)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as directory:
        out, again = Path(directory) / "out", Path(directory) / "again"
        for target, chosen in ((out, order), (again, list(tensors))):
            with writing(target, specs, shard) as writer:
                for name in chosen:
                    writer.write({name: tensors[name]})
        assert listing(out) == listing(again)  # whatever the order of writing
        read = load(out)
        assert read.keys() == tensors.keys()
        assert all(same(read[name], tensor) for name, tensor in tensors.items())
        (out / "config.json").write_text("{}")
        ckpt = Checkpoint.open(out)
        assert all(same(tensor, tensors[name]) for name, tensor in ckpt.read(ckpt.tensors).items())


@given(some_specs, st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_layout_keeps_the_limit_and_alignment(specs: list[TensorSpec], limit: int) -> None:
    shards = lay_out(specs, limit)
    assert shards == lay_out(specs, limit)
    position = {spec.name: number for number, spec in enumerate(specs)}
    placed = [sorted(position[info.name] for info in shard.tensors) for shard in shards]
    assert [number for shard in placed for number in shard] == list(range(len(specs)))
    for shard in shards:
        assert len(shard.header) % 8 == 0 and shard.size == shard.tensors[-1].end
        assert sum(info.nbytes for info in shard.tensors) <= limit or sum(i.nbytes > 0 for i in shard.tensors) == 1
        assert all(info.start % TORCH_DTYPES[info.dtype].itemsize == 0 for info in shard.tensors)
    single = [shard.file for shard in shards] == ["model.safetensors"]
    assert single or all(
        shard.file == f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number, shard in enumerate(shards, 1)
    )


def test_layout_refuses_what_no_file_can_hold() -> None:
    spec = TensorSpec("w", "F32", (2,))
    for specs, limit, kind in [([], 10, CheckpointError), ([spec, spec], 10, CheckpointError), ([spec], 0, UsageError)]:
        with pytest.raises(kind):
            lay_out(specs, limit)
    for name, dtype, shape in [
        ("w", "Q4", (2,)),
        ("w", "F32", (-1,)),
        ("w\n", "F32", (1,)),
        ("__metadata__", "F32", (1,)),
    ]:
        with pytest.raises(CheckpointError):
            TensorSpec(name, dtype, shape)
