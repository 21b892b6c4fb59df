"""Streaming block by block computes what the whole model computes, for every architecture and ragged rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo.models import EVERY, full_model, rows

from quantkit.blocks import stream as stream_module
from quantkit.blocks.skeleton import Skeleton, build_skeleton
from quantkit.blocks.stream import Stream
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import NumericalError

Zoo = Callable[..., Path]
RAGGED = rows(16, 9, 16, 2, 9, 16)


def opened(path: Path) -> tuple[Skeleton, Callable[[dict[str, str]], dict[str, Tensor]]]:
    """The skeleton of a checkpoint, and a reader of {parameter: tensor name} in float32."""
    source = Checkpoint.open(path)

    def read(names: dict[str, str]) -> dict[str, Tensor]:
        return {name: source.read([tensor])[tensor].float() for name, tensor in names.items()}

    return build_skeleton(path, source.tensors), read


@torch.no_grad()
def reference(model: Any, paths: list[str], ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """What each block of the whole model returns, and the logits."""
    outputs: list[Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    handles = [model.get_submodule(path).register_forward_hook(keep) for path in paths]
    logits = model(ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return outputs, logits


@pytest.mark.parametrize("architecture", EVERY)
def test_hidden_states_and_logits_are_the_whole_models(zoo: Zoo, architecture: str) -> None:
    path = zoo(architecture)
    skeleton, read = opened(path)
    outer = read(skeleton.outer)
    model, paths = full_model(path), [block.path for block in skeleton.blocks]

    stream = Stream.embed(skeleton, outer, RAGGED)
    expected = [reference(model, paths, torch.stack([RAGGED[i] for i in batch.rows])) for batch in stream.batches]

    assert len(stream.batches) == 3  # one for each length
    for block in skeleton.blocks:
        stream.advance(block, read(block.tensors))
        for batch, (outputs, _) in zip(stream.batches, expected, strict=True):
            assert torch.equal(batch.hidden, outputs[block.index]), block.path
    for batch, (_, logits) in zip(stream.batches, expected, strict=True):
        assert torch.equal(skeleton.logits(outer, batch.hidden), logits)


@pytest.mark.parametrize("architecture", ["gemma3_text", "opt", "bloom"])
def test_a_row_alone_gives_what_it_gives_beside_others(zoo: Zoo, architecture: str) -> None:
    path = zoo(architecture)
    skeleton, read = opened(path)
    outer = read(skeleton.outer)

    def final(ids: list[Tensor]) -> dict[int, Tensor]:
        stream = Stream.embed(skeleton, outer, ids)
        for block in skeleton.blocks:
            stream.advance(block, read(block.tensors))
        return dict(stream.ordered())

    together = final(RAGGED)

    assert sorted(together) == list(range(len(RAGGED)))
    for i, row in enumerate(RAGGED):
        assert together[i].shape[0] == len(row)
        torch.testing.assert_close(together[i], final([row])[0], rtol=1e-4, atol=1e-5)


def test_the_full_precision_states_travel_beside_the_quantized_ones(zoo: Zoo) -> None:
    path = zoo("llama")
    skeleton, read = opened(path)
    outer = read(skeleton.outer)
    plain, both = Stream.embed(skeleton, outer, RAGGED), Stream.embed(skeleton, outer, RAGGED, reference=True)
    for block in skeleton.blocks:
        weights = read(block.tensors)
        plain.advance(block, weights)
        both.advance_reference(block, weights)
        both.advance(block, weights | {"mlp.up_proj.weight": weights["mlp.up_proj.weight"] * 1.1})

    for left, right in zip(plain.batches, both.batches, strict=True):
        assert left.reference is None and right.reference is not None
        assert torch.equal(left.hidden, right.reference)
        assert not torch.equal(right.hidden, right.reference)


def test_the_model_is_not_left_changed(zoo: Zoo) -> None:
    skeleton, read = opened(zoo("llama"))
    Stream.embed(skeleton, read(skeleton.outer), RAGGED)

    assert all("forward" not in vars(block.module) for block in skeleton.blocks)
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())


def test_batches_hold_rows_of_one_length_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "BATCH_TOKENS", 32)

    batches = stream_module._batches_of(rows(16, 40, 9, 16, 9, 16, 9, 9))

    assert batches == [(0, 3), (5,), (1,), (2, 4, 6), (7,)]


def test_a_block_that_overflows_is_named(zoo: Zoo) -> None:
    skeleton, read = opened(zoo("llama"))
    stream = Stream.embed(skeleton, read(skeleton.outer), RAGGED)
    weights = read(skeleton.blocks[0].tensors)
    weights["mlp.down_proj.weight"] *= torch.finfo(torch.float32).max

    with pytest.raises(NumericalError, match=r"the output of `model\.layers\.0` is not finite"):
        stream.advance(skeleton.blocks[0], weights)
