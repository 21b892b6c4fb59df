"""Sizes of models by their configs, against numbers worked out here, and of artifacts, against their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fit.configs import DEEPSEEK, GEMMA, LLAMA_70B, MIXTRAL, folder
from quantkit.errors import CheckpointError, UnsupportedScheme, UsageError
from quantkit.fit.measure import cache_shape, measure
from quantkit.scheme import Scheme

Make = Callable[..., Any]

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "num_hidden_layers": 6}
# of a layer of the 70B model: q and o, k and v, then gate, up and down
LINEARS_70B = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 8192 * 28672)
VECTORS_70B = 80 * 2 * 8192 + 8192
TABLE_70B = 128256 * 8192


def test_seventy_billion_parameters(tmp_path: Path) -> None:
    sizes = measure(folder(tmp_path, LLAMA_70B))
    whole, packed = sizes.weights["16-bit"], sizes.weights["4-bit"]

    assert sizes.parameters == LINEARS_70B + VECTORS_70B + 2 * TABLE_70B == 70_553_706_496
    assert whole.total == 2 * sizes.parameters == 141_107_412_992
    # a code of half a byte, and a scale of two bytes for each 128 of them; the rest as it was
    assert packed.total == LINEARS_70B // 2 + LINEARS_70B // 128 * 2 + 2 * VECTORS_70B + 4 * TABLE_70B
    assert 35e9 < packed.total < 40e9
    assert (packed.head, packed.other - 2 * 8192) == (2 * TABLE_70B, 2 * TABLE_70B)
    assert packed.vectors == whole.vectors == 2 * VECTORS_70B
    assert (sizes.heads, sizes.positions, sizes.routing, sizes.notes) == (64, 8192, None, ())
    assert sizes.packing == "4-bit, group 128, symmetric"


def test_the_cache_of_a_token_of_seventy_billion_parameters(tmp_path: Path) -> None:
    cache = measure(folder(tmp_path, LLAMA_70B)).cache

    assert cache.per_token(2) == 80 * 8 * 2 * 128 * 2 == 327_680
    assert cache.per_token(1) == 163_840
    assert cache.per_token(2, gpus=4) == 327_680 // 4
    assert cache.per_token(2, gpus=16) == 327_680 // 8  # a rank has one head at least
    assert cache.per_sequence(8192, 2) == 8192 * 327_680


@pytest.mark.parametrize(("tokens", "held"), [(1, 16), (16, 16), (17, 32), (8191, 8192)])
def test_a_sequence_takes_whole_pages(tokens: int, held: int, tmp_path: Path) -> None:
    cache = measure(folder(tmp_path, LLAMA_70B)).cache

    assert cache.per_sequence(tokens, 1) == held * 163_840
    assert cache.per_sequence(tokens, 1, page=1) == tokens * 163_840


@pytest.mark.parametrize(
    ("scheme", "bits_per_weight"),
    [
        (Scheme(4, 128, False), 4 + 16 / 128 + 4 / 128),
        (Scheme(8, 64), 8 + 16 / 64),
        (Scheme(8, 64, False), 8 + 16 / 64 + 8 / 64),
        (Scheme(4, 32), 4.5),
    ],
    ids=str,
)
def test_other_schemes(scheme: Scheme, bits_per_weight: float, tmp_path: Path) -> None:
    sizes = measure(folder(tmp_path, LLAMA_70B, num_hidden_layers=2), scheme)
    linears = LINEARS_70B // 40

    assert sizes.weights[f"{scheme.bits}-bit"].blocks == linears * bits_per_weight / 8 + 2 * 2 * 2 * 8192


def test_whole_rows_have_one_scale_each(tmp_path: Path) -> None:
    sizes = measure(folder(tmp_path, LLAMA_70B, num_hidden_layers=1), Scheme(4, -1))
    rows = 8192 + 1024 + 1024 + 8192 + 28672 + 28672 + 8192

    assert sizes.weights["4-bit"].blocks == LINEARS_70B // 80 // 2 + 2 * rows + 2 * 2 * 8192


def test_linears_that_groups_do_not_tile_are_counted_in_16_bit(tmp_path: Path) -> None:
    path = folder(tmp_path, LLAMA_70B, num_hidden_layers=1, intermediate_size=28672 + 64)
    sizes = measure(path)
    attention, halves = 2 * 8192 * 8192 + 2 * 1024 * 8192, 8192 * (28672 + 64)

    assert sizes.weights["4-bit"].blocks == (attention + 2 * halves) * (4 + 16 / 128) / 8 + 2 * halves + 2 * 2 * 8192
    assert any("groups of 128 do not tile the inputs of 1 linears, such as `" in note for note in sizes.notes)
    assert any("down_proj" in note for note in sizes.notes)


def test_a_tied_head_is_there_once(tmp_path: Path) -> None:
    sizes = measure(folder(tmp_path, GEMMA))

    assert sizes.weights["16-bit"].head == 2 * 262144 * 1152
    assert sizes.weights["16-bit"].other == 2 * 1152  # the last norm
    assert 0.99e9 < sizes.parameters < 1.01e9


def test_windows(tmp_path: Path) -> None:
    """Every sixth layer sees everything: 4 of 26; the others keep 512 tokens."""
    sizes = measure(folder(tmp_path, GEMMA))
    token = 1 * 2 * 256 * 2

    assert sizes.cache.layers == {512: 22, None: 4}
    assert sizes.cache.per_sequence(8192, 2) == (22 * 512 + 4 * 8192) * token
    assert sizes.cache.per_sequence(500, 2) == 26 * 512 * token
    assert sizes.cache.per_token(2) == 26 * token
    assert any(note.startswith("22 layers keep at most the last 512 tokens") for note in sizes.notes)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, {None: 6}),
        ({"sliding_window": 64}, {64: 6}),
        ({"sliding_window": 64, "use_sliding_window": False}, {None: 6}),
        ({"sliding_window": None}, {None: 6}),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, {None: 1}),
        ({"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 32}, {32: 1, None: 1}),
        ({"layer_types": ["sliding_attention", "conv", "mamba"], "sliding_window": 16}, {16: 1}),
    ],
)
def test_layers_that_keep_tokens(config: dict[str, Any], layers: dict[int | None, int]) -> None:
    assert cache_shape(HEADS | config).layers == layers


@pytest.mark.parametrize(
    ("config", "heads", "width"),
    [
        ({}, 2, 2 * 8),
        ({"num_key_value_heads": None}, 8, 2 * 8),
        ({"head_dim": 32}, 2, 2 * 32),
        ({"num_key_value_heads": None, "multi_query": True}, 1, 2 * 8),
        ({"num_key_value_heads": None, "num_kv_heads": 4}, 4, 2 * 8),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 1, 576),
    ],
)
def test_heads_and_their_width(config: dict[str, Any], heads: int, width: int) -> None:
    cache = cache_shape(HEADS | config)

    assert (cache.heads, cache.width) == (heads, width)


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no layer of this model keeps keys and values"):
        cache_shape(HEADS | {"layer_types": ["mamba"] * 6})
    with pytest.raises(CheckpointError, match="has no `num_hidden_layers`"):
        cache_shape({"num_attention_heads": 8, "hidden_size": 64})


def test_a_latent_is_shared_by_all_heads(tmp_path: Path) -> None:
    cache = measure(folder(tmp_path, DEEPSEEK)).cache

    assert cache.per_token(2) == 4 * (512 + 64) * 2
    assert cache.per_token(2, gpus=8) == cache.per_token(2)  # each rank holds all of it
    assert cache.per_token(1) == 4 * 576


def test_experts(tmp_path: Path) -> None:
    sizes = measure(folder(tmp_path, MIXTRAL))
    experts = 32 * 8 * 3 * 4096 * 14336
    routers, attention = 32 * 8 * 4096, 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096)
    whole, packed = sizes.weights["16-bit"], sizes.weights["4-bit"]

    assert sizes.parameters == experts + routers + attention + 65 * 4096 + 2 * 32000 * 4096
    assert (whole.experts, packed.experts) == (2 * experts, experts * (4 + 16 / 128) / 8)
    assert packed.blocks == (experts + attention) * (4 + 16 / 128) / 8 + 2 * routers + 64 * 2 * 4096
    assert sizes.routing is not None and (sizes.routing.experts, sizes.routing.active) == (8, 2)


@pytest.mark.parametrize(
    "recipe",
    [
        {"format": "compressed-tensors"},
        {"format": "compressed-tensors", "symmetric": False},
        {"format": "gptq"},
        {"format": "awq", "symmetric": False},
        {"format": "modelopt"},
    ],
)
def test_an_artifact_is_as_large_as_it_is(recipe: dict[str, Any], make_artifact: Make) -> None:
    made = make_artifact("llama", method="rtn", **recipe)
    sizes, plain = measure(made.path), measure(made.source, Scheme(4, 32))
    raw = (made.path / "model.safetensors").read_bytes()

    assert list(sizes.weights) == ["16-bit", "as stored"]
    assert sizes.weights["as stored"].total == len(raw) - 8 - int.from_bytes(raw[:8], "little")
    assert sizes.parameters == plain.parameters
    assert sizes.weights["16-bit"] == plain.weights["16-bit"]
    assert sizes.packing.startswith("4-bit, group 32")
    assert sizes.cache == plain.cache


def test_an_artifact_has_a_scheme_already(make_artifact: Make) -> None:
    made = make_artifact("llama", method="rtn")

    with pytest.raises(UsageError, match="is quantized already"):
        measure(made.path, Scheme())


def test_a_config_of_a_quantized_model_is_sized_as_the_plain_one(tmp_path: Path) -> None:
    packing = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    path = folder(tmp_path, LLAMA_70B, num_hidden_layers=1, quantization_config=packing)

    assert any("describes a quantized model; without its weights" in note for note in measure(path).notes)


def test_what_cannot_be_sized(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is no folder with a config\.json"):
        measure(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="valid JSON"):
        measure(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(CheckpointError, match="no-such-model"):
        measure(tmp_path)
    with pytest.raises(UnsupportedScheme, match="3 bits"):
        Scheme(3)
