"""What attention hands to a KV cache: seen after the rotary embedding, over all rows, and replaced to simulate FP8."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache
from zoo.models import EVERY, full_model, rows

from quantkit.blocks.kvcache import CacheObserver, CacheSimulator, cache_scales, expects_cache, find_attentions
from quantkit.blocks.stream import Stream
from quantkit.errors import CheckpointError, NumericalError, UnsupportedScheme
from quantkit.formats.kv_cache import CacheScales

from .test_stream import opened

Zoo = Callable[..., Path]
RAGGED = rows(16, 9, 16, 2)
LLAMA = "model.layers.0.self_attn"
MORE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},  # takes the cache by place
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4},
    "lfm2": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    # attention and a recurrent part beside each other in every block
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1},
}


def observed(path: Path, ids: Sequence[Tensor]) -> dict[str, tuple[float, float]]:
    """{attention: largest |K| and |V|} of all blocks."""
    skeleton, read = opened(path)
    stream, observer = Stream.embed(skeleton, read(skeleton.outer), ids), CacheObserver()
    for block in skeleton.blocks:
        stream.advance(block, read(block.tensors), observer)
    return observer.amax


@torch.no_grad()
def cached(path: Path, ids: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Largest |K| and |V| of each layer that the whole model leaves in transformers' own cache."""
    model = full_model(path)
    largest: list[tuple[float, float]] = []
    for row in ids:
        cache = DynamicCache()  # without a config, no layer drops what is beyond its window
        model(row[None], past_key_values=cache, use_cache=True)
        seen = [(float(layer.keys.abs().max()), float(layer.values.abs().max())) for layer in cache.layers]
        largest = [(max(a, c), max(b, d)) for (a, b), (c, d) in zip(largest or seen, seen, strict=True)]
    return largest


@pytest.mark.parametrize("architecture", [*EVERY, *MORE])
def test_watching_changes_nothing_and_finds_every_attention(zoo: Zoo, architecture: str) -> None:
    path = zoo(architecture, **MORE.get(architecture, {}))
    skeleton, read = opened(path)
    outer, found = read(skeleton.outer), find_attentions(skeleton)
    plain, watched = Stream.embed(skeleton, outer, RAGGED), Stream.embed(skeleton, outer, RAGGED)
    for block in skeleton.blocks:
        weights, observer = read(block.tensors), CacheObserver()
        plain.advance(block, weights)
        watched.advance(block, weights, observer)
        assert all(torch.equal(a.hidden, b.hidden) for a, b in zip(plain.batches, watched.batches, strict=True))
        assert set(observer.amax) == {name for name, index in found.items() if index == block.index}
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in block.module.modules())

    stored = {name.rpartition(".")[0] for name in skeleton.inside()}
    for name, index in found.items():
        assert any(each.startswith(f"{name}.") for each in stored) and str(index) in name.split(".")
    assert list(found.values()) == ([1, 3] if architecture == "lfm2" else list(range(len(skeleton.blocks))))


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
# grouped heads, norms on q and k, a fused projection, half of a head rotated, layers without rotation, alibi, windows
@pytest.mark.parametrize(
    "architecture", ["llama", "qwen3", "gemma3_text", "phi3", "gpt_neox", "phi", "smollm3", "bloom", "mistral", "opt"]
)
def test_the_maxima_are_those_of_the_whole_models_cache(zoo: Zoo, architecture: str) -> None:
    path = zoo(architecture)

    found = observed(path, RAGGED)

    for seen, expected in zip(found.values(), cached(path, RAGGED), strict=True):
        assert seen == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_keys_are_seen_after_the_rotary_embedding(zoo: Zoo) -> None:
    path = zoo("llama")
    skeleton, read = opened(path)
    row, outer = rows(16)[0], read(skeleton.outer)
    weights = read(skeleton.blocks[0].tensors)
    stream, observer = Stream.embed(skeleton, outer, [row]), CacheObserver()
    (hidden, _), *_ = stream.inputs(skeleton.blocks[0])
    # equal numbers in each plane, of which a turn makes one larger by up to sqrt(2); the largest turn fastest
    projection = weights["self_attn.k_proj.weight"].view(2, 2, 8, 64)
    projection[:] = projection[:, :1].roll(1, dims=2)
    norm = weights["input_layernorm.weight"]
    x = hidden[0] * torch.rsqrt(hidden[0].square().mean(-1, keepdim=True) + skeleton.model.config.rms_norm_eps) * norm
    keys = (x @ weights["self_attn.k_proj.weight"].T).view(16, 2, 16)  # tokens, heads, dimensions
    # Su et al., 2021, equation 34, with dimension i beside i + 8: a rotation of the plane by position * theta_i
    angle = torch.arange(16)[:, None] * 10000.0 ** (-torch.arange(8) / 8)
    plane = torch.complex(keys[..., :8], keys[..., 8:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    rotated = max(float(plane.real.abs().max()), float(plane.imag.abs().max()))

    stream.advance(skeleton.blocks[0], weights, observer)

    k, v = observer.amax[LLAMA]
    assert k == pytest.approx(rotated, rel=1e-5)
    assert k > 1.05 * float(keys.abs().max())
    assert v == pytest.approx(float((x @ weights["self_attn.v_proj.weight"].T).abs().max()), rel=1e-5)


def test_rows_of_different_lengths_count_as_each_alone(zoo: Zoo) -> None:
    path, ids = zoo("llama"), rows(36, 5, 36, 2, 12)
    ids[2] = torch.full((36,), 5)  # of one token throughout

    together = observed(path, ids)
    alone = [observed(path, [row]) for row in ids]

    for name, pair in together.items():
        for part in (0, 1):
            assert pair[part] == pytest.approx(max(each[name][part] for each in alone), rel=1e-5)
    # what is the largest is not so in every row, so a row that was left out or padded would show
    assert len({each[LLAMA] for each in alone}) == len(ids)


def test_any_row_may_hold_the_largest(zoo: Zoo) -> None:
    path, ids = zoo("llama"), rows(16, 9, 12)
    alone = [observed(path, [row])[LLAMA][0] for row in ids]
    order = sorted(range(3), key=lambda i: -alone[i])

    for chosen in (order, order[::-1]):  # falling and rising
        assert observed(path, [ids[i] for i in chosen])[LLAMA][0] == pytest.approx(max(alone), rel=1e-5)
    assert observed(path, [ids[i] for i in order[1:]])[LLAMA][0] == pytest.approx(alone[order[1]], rel=1e-5)
    assert alone[order[1]] < 0.99 * alone[order[0]]


@settings(deadline=None)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8))
def test_it_is_a_running_maximum_and_not_a_mean(numbers: list[float]) -> None:
    observer = CacheObserver()
    for number in numbers:
        keys, values = torch.full((1, 2, 3, 4), number), torch.full((1, 2, 3, 4), number / 2)
        assert observer("attention", keys, values) == (keys, values)

    largest = max(map(abs, numbers))
    assert observer.amax == {"attention": (largest, pytest.approx(largest / 2))}


def test_scales_put_the_largest_on_448() -> None:
    assert cache_scales("a", 448.0, 4.48) == CacheScales(1.0, pytest.approx(0.01))
    assert cache_scales("a", 0.0, 1.0) == CacheScales(1.0, 1 / 448)  # nothing but zeros: any scale will do
    assert cache_scales("a", 1e-44, 1.0).k == torch.finfo(torch.float32).tiny  # and not zero once it is stored


@pytest.mark.parametrize(
    ("pair", "which"), [((math.inf, 1.0), "keys"), ((1.0, math.nan), "values"), ((math.nan, 1.0), "keys")]
)
def test_values_that_are_not_finite_are_named(pair: tuple[float, float], which: str) -> None:
    observer = CacheObserver()
    for numbers in (pair, (1.0, 1.0)):  # what comes later must not hide them
        observer("model.layers.7.self_attn", *(torch.full((1, 1, 1, 1), number) for number in numbers))

    with pytest.raises(NumericalError, match=rf"the {which} of `model\.layers\.7\.self_attn` are not finite"):
        observer.scales(["model.layers.7.self_attn"])


def test_an_attention_that_was_never_seen_is_named() -> None:
    observer = CacheObserver()
    observer("a", torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1))

    assert observer.scales(["a"]) == {"a": CacheScales(1 / 448, 1 / 448)}
    with pytest.raises(CheckpointError, match="`b` handed no keys and values to its cache"):
        observer.scales(["a", "b"])


def test_layers_without_a_cache_are_those_the_config_names(zoo: Zoo) -> None:
    skeleton, _ = opened(zoo("lfm2", **MORE["lfm2"]))
    config = skeleton.model.config

    assert [expects_cache(config, index) for index in range(4)] == [False, True, False, True]
    config.layer_types = ["full_attention"] * 4
    with pytest.raises(UnsupportedScheme, match=r"`model\.layers\.0` cannot be run with a KV cache"):
        find_attentions(skeleton)


def test_a_block_that_keeps_nothing_is_refused(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton, _ = opened(zoo("llama"))
    monkeypatch.setattr(type(skeleton.blocks[0].module), "forward", lambda _, hidden, cache=None, **__: hidden)

    with pytest.raises(UnsupportedScheme, match=r"`model\.layers\.0` hands no keys and values to a cache"):
        find_attentions(skeleton)


def test_a_model_without_attention_is_refused(zoo: Zoo) -> None:
    skeleton, _ = opened(zoo("mamba", state_size=8))

    with pytest.raises(UnsupportedScheme, match="no layer of the model keeps keys and values"):
        find_attentions(skeleton)


def test_a_latent_cache_is_refused(zoo: Zoo) -> None:
    skeleton, _ = opened(zoo("llama"))
    skeleton.model.config.kv_lora_rank = 16

    with pytest.raises(UnsupportedScheme, match="caches a latent vector"):
        find_attentions(skeleton)


def test_a_block_that_takes_no_cache_is_refused(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton, read = opened(zoo("llama"))
    stream = Stream.embed(skeleton, read(skeleton.outer), rows(9))
    block = skeleton.blocks[0]
    for batch in stream.batches:
        batch.calls = [(args, {n: v for n, v in kwargs.items() if v is not None}) for args, kwargs in batch.calls]
    monkeypatch.setattr(block.module, "forward", lambda hidden, attention_mask=None: hidden)

    with pytest.raises(UnsupportedScheme, match=r"`model\.layers\.0` takes no KV cache"):
        stream.advance(block, read(block.tensors), CacheObserver())


def test_the_checkpoints_names_are_used_where_they_differ(zoo: Zoo) -> None:
    skeleton, read = opened(zoo("llama"))
    block = skeleton.blocks[0]
    stream, observer = Stream.embed(skeleton, read(skeleton.outer), rows(9)), CacheObserver()
    weights = read(block.tensors)
    block.tensors.update({name: f"language_model.{tensor}" for name, tensor in block.tensors.items()})

    stream.advance(block, weights, observer)

    assert list(observer.amax) == [f"language_model.{LLAMA}"]
    assert find_attentions(skeleton) == {f"language_model.{LLAMA}": 0, "model.layers.1.self_attn": 1}


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "bloom", "gpt_neox"])
def test_proper_scales_cost_little_and_others_much(zoo: Zoo, architecture: str) -> None:
    path = zoo(architecture)
    skeleton, read = opened(path)
    outer, ids = read(skeleton.outer), rows(16, 9)
    block = skeleton.blocks[0]
    weights = read(block.tensors)

    def after(tap: Any) -> Tensor:
        stream = Stream.embed(skeleton, outer, ids)
        stream.advance(block, weights, tap)
        return torch.cat([hidden for _, hidden in stream.ordered()])

    observer = CacheObserver()
    exact = after(observer)
    (name,) = observer.amax
    before = torch.cat([hidden for _, hidden in Stream.embed(skeleton, outer, ids).ordered()])

    def error(scales: CacheScales) -> float:
        moved = after(CacheSimulator({name: scales})) - exact
        return float(moved.norm() / (exact - before).norm())

    proper = error(observer.scales([name])[name])
    assert 0 < proper < 0.1
    for broken in (0.001, 1000.0):
        assert error(CacheScales(broken, broken)) > 5 * proper


def test_the_simulator_rounds_keys_and_values_at_their_own_scales() -> None:
    keys, values = torch.tensor([1.0, 1.05, 500.0]), torch.tensor([0.26, 1e-4, -500.0])

    seen_keys, seen_values = CacheSimulator({"a": CacheScales(1.0, 2.0)})("a", keys, values)

    assert seen_keys.tolist() == [1.0, 1.0, 448.0]
    assert seen_values.tolist() == [0.25, 0.0, -512.0]
