"""What a block sees of its calibration rows: every token once, no padding, each row whatever its length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from zoo.models import full_model, rows

from quantkit.blocks.block import captured, hooks
from quantkit.blocks.probe import Prober
from quantkit.blocks.stream import Stream
from quantkit.errors import NumericalError
from quantkit.group import LinearGroup
from quantkit.ops.stats import InputStats

from .test_stream import opened

Zoo = Callable[..., Path]
CPU = torch.device("cpu")


def observed(path: Path, ids: Sequence[Tensor], index: int) -> dict[LinearGroup, InputStats]:
    """The statistics in front of block `index`."""
    skeleton, read = opened(path)
    outer = read(skeleton.outer)
    stream, prober = Stream.embed(skeleton, outer, ids), Prober(skeleton, outer)
    for block in skeleton.blocks[:index]:
        stream.advance(block, read(block.tensors))
    block = skeleton.blocks[index]
    weights = read(block.tensors)
    return block.observe(weights, stream.inputs(block), prober.probe(block, lambda: weights).groups, CPU)


@pytest.mark.parametrize(
    (
        "architecture",
        "index",
    ),  # in the hybrids: the first block with full attention, behind blocks with sliding windows
    [("llama", 1), ("gemma3_text", 5), ("cohere2", 3), ("opt", 1), ("bloom", 1), ("mistral", 1)],
)
@torch.no_grad()
def test_statistics_are_those_of_the_whole_models_inputs(zoo: Zoo, architecture: str, index: int) -> None:
    path, ids = zoo(architecture), rows(16, 9, 16, 3)
    model: Any = full_model(path)
    skeleton, _ = opened(path)
    prefix = skeleton.blocks[index].path

    for group, stats in observed(path, ids, index).items():
        with captured(model, f"{prefix}.{group.names[-1]}") as calls:
            for row in ids:
                model(row[None], use_cache=False)
        inputs = torch.cat([args[0].reshape(-1, group.in_features) for args, _, _ in calls]).double()

        assert stats.count == len(inputs) == 44
        exact = inputs.T @ inputs
        torch.testing.assert_close(stats.hessian.double(), exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))
        torch.testing.assert_close(stats.abs_sum.double(), inputs.abs().sum(0), rtol=1e-4, atol=1e-5)


def test_ragged_rows_together_equal_the_sum_of_rows_alone(zoo: Zoo) -> None:
    ids = rows(36, 5, 36, 2, 12)

    together = observed(zoo("qwen2"), ids, 1)
    alone = [observed(zoo("qwen2"), [row], 1) for row in ids]

    for group, stats in together.items():
        summed = sum(each[group].hessian for each in alone)
        assert stats.count == sum(each[group].count for each in alone) == 91
        torch.testing.assert_close(stats.hessian, summed, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(stats.abs_sum, sum(each[group].abs_sum for each in alone), rtol=1e-4, atol=1e-3)


def test_wide_inputs_have_both_triangles(zoo: Zoo) -> None:
    found = observed(zoo("llama", intermediate_size=320), rows(9), 0)

    for stats in found.values():
        assert torch.equal(stats.hessian, stats.hessian.T)
    assert max(group.in_features for group in found) == 320


@pytest.mark.parametrize("changed", range(3))
def test_every_row_counts(zoo: Zoo, changed: int) -> None:
    ids = rows(36, 5, 12)
    before = observed(zoo("llama"), ids, 0)
    ids[changed] = rows(len(ids[changed]), seed=9)[0]

    after = observed(zoo("llama"), ids, 0)

    for group, stats in before.items():
        assert not torch.allclose(stats.hessian, after[group].hessian, rtol=1e-3)
        assert stats.count == after[group].count == 53


def test_an_input_that_is_not_finite_is_named(zoo: Zoo) -> None:
    skeleton, read = opened(zoo("llama"))
    outer = read(skeleton.outer)
    block = skeleton.blocks[1]
    weights = read(block.tensors)
    prober, stream = Prober(skeleton, outer), Stream.embed(skeleton, outer, rows(9))
    groups = prober.probe(block, lambda: weights).groups
    weights["post_attention_layernorm.weight"][3] = torch.inf

    with pytest.raises(NumericalError, match=r"the input of `model\.layers\.1\.mlp\.gate_proj` is not finite"):
        block.observe(weights, stream.inputs(block), groups, CPU)


def test_hooks_are_gone_even_after_a_failure() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))

    def fail(*_: Any) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), hooks(module, {"0": fail}), captured(module, ""):
        module(torch.ones(1, 2))

    assert not module._forward_hooks and not module[0]._forward_pre_hooks
