"""The stage for methods that learn: what they are given, and that what they return is what is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quantkit.blocks.skeleton import build_skeleton
from quantkit.blocks.stream import Stream
from quantkit.data.corpus import load_corpus
from quantkit.data.tokens import load_tokenizer, tokenize
from quantkit.methods import METHODS
from quantkit.methods.base import Example
from quantkit.methods.rtn import Rtn
from quantkit.pipeline import quantize
from quantkit.qweight import QuantizedWeight
from quantkit.recipe import Recipe
from quantkit.weights import WeightSource
from tests.zoo.artifacts import dequantized, read_all


class Probing(Rtn):
    """A method that looks at what it may tune on, and turns the sign of every weight."""

    tunes = True

    def __init__(self) -> None:
        self.targets: list[Tensor] = []
        self.gradients: list[float] = []

    def tune(
        self, weights: Mapping[str, Tensor], quantized: dict[str, QuantizedWeight], examples: Sequence[Example]
    ) -> dict[str, QuantizedWeight]:
        self.targets.append(torch.cat([example.target.flatten(0, 1) for example in examples]))
        with torch.enable_grad():
            learned = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
            loss = sum(
                (example.run(learned) - example.target).square().sum() + example.run(learned).sum()
                for example in examples
            )
            loss.backward()
        self.gradients += [float(weight.grad.norm()) for weight in learned.values() if weight.grad is not None]
        assert len(learned) == len(quantized) and set(weights) == set(quantized)
        return {name: replace(q, codes=(16 - q.codes).clamp(max=15)) for name, q in quantized.items()}


def test_a_method_that_tunes_sees_the_full_precision_stream_and_has_the_last_word(
    zoo: Callable[..., Path], calibration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = Probing()
    monkeypatch.setitem(METHODS, "rtn", method)
    source = zoo("llama")
    recipe = Recipe(method="rtn", group_size=32, calibration=str(calibration), samples=4, dtype="float32")

    record = quantize(recipe, str(source), tmp_path / "out")

    assert min(method.gradients) > 0 and len(method.gradients) == 14
    # twice the output is missing: four times its square
    assert all(entry["error"] == pytest.approx(4.0, rel=0.05) for entry in record.linears.values())
    name = "model.layers.0.mlp.down_proj.weight"
    pair = torch.stack([dequantized(tmp_path / "out")[name].flatten(), read_all(source)[name].flatten().float()])
    assert torch.corrcoef(pair)[0, 1] < -0.98
    # the quantized stream is another one; the targets are those of the full-precision model
    for target, expected in zip(method.targets, full_precision(source, recipe), strict=True):
        assert torch.equal(target, expected)


def full_precision(source: Path, recipe: Recipe) -> list[Tensor]:
    """Hidden states [S * T, D] behind every block of the unquantized model, on the recipe's rows."""
    weights = WeightSource.open(source)
    skeleton = build_skeleton(source, weights.tensors)
    corpus = load_corpus(recipe.calibration)
    rows = tokenize(corpus, load_tokenizer(source), samples=recipe.samples, seq_len=recipe.seq_len, seed=recipe.seed)
    stream = Stream.embed(skeleton, weights_of(weights, skeleton.outer), rows.rows)
    found = []
    for block in skeleton.blocks:
        stream.advance(block, weights_of(weights, block.tensors))
        found.append(torch.cat([batch.hidden.flatten(0, 1) for batch in stream.batches]))
    return found


def weights_of(source: WeightSource, tensors: Mapping[str, str]) -> dict[str, Tensor]:
    return {name: source.read([tensor], torch.float32)[tensor] for name, tensor in tensors.items()}
