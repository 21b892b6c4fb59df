"""Which linears share an input and what can absorb their scaling: found by running, checked here by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from zoo.models import EVERY, rows

from quantkit.blocks.probe import Probe, Prober, apply_fold
from quantkit.blocks.stream import Stream
from quantkit.group import Fold, FoldKind, LinearGroup
from quantkit.inspection import inspect

from .test_stream import opened

Zoo = Callable[..., Path]
NORM, PLUS_ONE, LINEAR = FoldKind.NORM, FoldKind.NORM_PLUS_ONE, FoldKind.LINEAR
# linears of a group: (producer, kind, first row, channels, consumer heads per producer head); None: nothing proved
Found = dict[str, tuple[str, FoldKind, int, int, int] | None]
ATTENTION = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
VALUES: Found = {"self_attn.o_proj": ("self_attn.v_proj", LINEAR, 0, 32, 2)}
DOWN: Found = {"mlp.down_proj": ("mlp.up_proj", LINEAR, 0, 96, 1)}
FUSED_MLP: Found = {
    "mlp.gate_up_proj": ("post_attention_layernorm", NORM, 0, 64, 1),
    "mlp.down_proj": ("mlp.gate_up_proj", LINEAR, 96, 96, 1),
}


def llama_like(kind: FoldKind = NORM, before_mlp: str = "post_attention_layernorm") -> Found:
    first: Found = {ATTENTION: ("input_layernorm", kind, 0, 64, 1)}
    return first | VALUES | {"mlp.gate_proj mlp.up_proj": (before_mlp, kind, 0, 64, 1)} | DOWN


def neox_like(attention: str) -> Found:
    return {
        f"{attention}.query_key_value": ("input_layernorm", NORM, 0, 64, 1),
        f"{attention}.dense": None,  # q, k and v of one head lie together, so v is no run of rows
        "mlp.dense_h_to_4h": ("post_attention_layernorm", NORM, 0, 64, 1),
        "mlp.dense_4h_to_h": None,  # a GELU in between
    }


PARALLEL: Found = {f"{ATTENTION} mlp.gate_proj mlp.up_proj": ("input_layernorm", NORM, 0, 64, 1), **VALUES, **DOWN}
EXPECTED: dict[str, Found] = {
    "llama": llama_like(),
    "qwen2": llama_like() | {"mlp.down_proj": ("mlp.up_proj", LINEAR, 0, 128, 1)},
    "qwen3": llama_like(),
    "gemma": llama_like(PLUS_ONE),
    "gemma2": llama_like(PLUS_ONE, "pre_feedforward_layernorm"),
    "gemma3_text": llama_like(PLUS_ONE, "pre_feedforward_layernorm"),
    "phi3": {
        "self_attn.qkv_proj": ("input_layernorm", NORM, 0, 64, 1),
        "self_attn.o_proj": ("self_attn.qkv_proj", LINEAR, 96, 32, 2),
        **FUSED_MLP,
    },
    # norms behind attention and behind the MLP only: what enters them is the residual stream itself
    "olmo2": {ATTENTION: None, **VALUES, "mlp.gate_proj mlp.up_proj": None, **DOWN},
    "cohere": PARALLEL,
    "gpt_neox": neox_like("attention"),
    "opt": {
        ATTENTION: ("self_attn_layer_norm", NORM, 0, 64, 1),
        "self_attn.out_proj": ("self_attn.v_proj", LINEAR, 0, 64, 1),
        "fc1": ("final_layer_norm", NORM, 0, 64, 1),
        "fc2": ("fc1", LINEAR, 0, 96, 1),  # a ReLU in between lets positive factors through
    },
    "glm4": {ATTENTION: ("input_layernorm", NORM, 0, 64, 1), **VALUES, **FUSED_MLP},
    "mistral": llama_like(),
    "granite": llama_like(),
    "starcoder2": {
        ATTENTION: ("input_layernorm", NORM, 0, 64, 1),
        **VALUES,
        "mlp.c_fc": ("post_attention_layernorm", NORM, 0, 64, 1),
        "mlp.c_proj": None,
    },
    "phi": {
        f"{ATTENTION} mlp.fc1": ("input_layernorm", NORM, 0, 64, 1),
        "self_attn.dense": ("self_attn.v_proj", LINEAR, 0, 32, 2),
        "mlp.fc2": None,
    },
    "bloom": neox_like("self_attention"),
    "smollm3": llama_like(),
    "cohere2": PARALLEL,
}


def probed(path: Path) -> Probe:
    [(_, probe)] = inspect(path).structures
    return probe


@pytest.mark.parametrize("architecture", EVERY)
def test_the_folds_are_those_of_the_architecture(zoo: Zoo, architecture: str) -> None:
    probe = probed(zoo(architecture))

    found = {
        " ".join(group.names): (fold := group.fold)
        and (fold.producer, fold.kind, fold.start, fold.channels, fold.repeat)
        for group in probe.groups
    }
    assert found == EXPECTED[architecture]
    assert probe.unused == ()
    # far from the limit on either side, so that it is no matter of luck
    assert all(group.fold.evidence < 2e-6 for group in probe.groups if group.fold)
    assert all(rejected.evidence > 1e-2 for rejected in probe.rejected)


@pytest.mark.parametrize("architecture", EVERY)
def test_attention_is_what_mixes_tokens(zoo: Zoo, architecture: str) -> None:
    probe = probed(zoo(architecture))

    mixing = {name for group in probe.groups if group.mixes_tokens for name in group.names}

    parallel = architecture in ("cohere", "cohere2", "phi")  # no scope but the block holds attention and MLP
    assert bool(mixing) is not parallel
    assert not any("mlp" in name or "fc" in name or "o_proj" in name or "dense" in name.split(".") for name in mixing)


@pytest.mark.parametrize("architecture", EVERY)
@torch.no_grad()
def test_folding_random_scales_everywhere_leaves_every_block_as_it_was(zoo: Zoo, architecture: str) -> None:
    skeleton, read = opened(zoo(architecture))
    outer = read(skeleton.outer)
    stream, prober = Stream.embed(skeleton, outer, rows(18)), Prober(skeleton, outer)
    generator = torch.Generator().manual_seed(1)

    for block in skeleton.blocks:
        weights = read(block.tensors)
        before = {name: weight.clone() for name, weight in weights.items()}
        [(hidden, call)] = stream.inputs(block)
        folded = weights
        for group in prober.probe(block, lambda w=weights: w).groups:
            if group.fold is None:
                continue
            s = (torch.randn(group.fold.channels, generator=generator) * 0.7).exp()
            folded, columns = apply_fold(folded, group, group.fold, s)
            torch.testing.assert_close(columns, group.fold.expand(s))

        plain = block(weights, hidden, call)
        moved = (block(folded, hidden, call) - plain).norm() / (plain - hidden).norm()
        assert moved < 1e-5
        assert any(not torch.equal(folded[name], weight) for name, weight in weights.items())
        assert all(torch.equal(weight, before[name]) for name, weight in weights.items())  # not modified
        stream.advance(block, weights)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3"])
@torch.no_grad()
def test_rounding_a_norm_to_16_bit_is_made_up_for_by_its_consumers(zoo: Zoo, architecture: str) -> None:
    """As stored: every weight in 16 bit. Only what is stored again in 16 bit may be rounded, and it is compensated."""
    skeleton, read = opened(zoo(architecture))
    outer = read(skeleton.outer)
    stream, prober = Stream.embed(skeleton, outer, rows(18)), Prober(skeleton, outer)
    block = skeleton.blocks[0]
    weights = read(block.tensors)
    stored = {name: weight.bfloat16() for name, weight in weights.items()}
    exact = {name: weight.float() for name, weight in stored.items()}
    [(hidden, call)] = stream.inputs(block)
    folded: dict[str, Tensor] = dict(stored)
    for group in reversed(prober.probe(block, lambda: weights).groups):
        assert group.fold
        s = (torch.randn(group.fold.channels, generator=torch.Generator().manual_seed(2)) * 0.7).exp()
        folded, columns = apply_fold(folded, group, group.fold, s)
        torch.testing.assert_close(columns, group.fold.expand(s), rtol=0.02, atol=0)

    plain = block(exact, hidden, call)
    moved = block({name: weight.float() for name, weight in folded.items()}, hidden, call) - plain

    assert moved.norm() / (plain - hidden).norm() < 1e-5
    assert all(folded[name].dtype == torch.bfloat16 for name in folded if "norm" in name)


def test_scales_tied_over_heads_repeat_head_by_head() -> None:
    fold = Fold("v", LINEAR, 4, channels=4, head_dim=2, repeat=3)
    s = torch.tensor([1.0, 2.0, 3.0, 4.0])
    group = LinearGroup(("o",), 12)
    weights = {"v.weight": torch.ones(8, 3), "v.bias": torch.ones(8), "o.weight": torch.ones(5, 12)}

    folded, columns = apply_fold(weights, group, fold, s)

    assert columns.tolist() == [1, 2, 1, 2, 1, 2, 3, 4, 3, 4, 3, 4]
    assert folded["v.bias"].tolist() == [1, 1, 1, 1, 1, 1 / 2, pytest.approx(1 / 3), 1 / 4]
    assert torch.equal(folded["v.weight"][:, 0], folded["v.bias"])
    assert torch.equal(folded["o.weight"], columns.expand(5, 12))


def test_a_zero_in_a_norm_folds_without_a_nan() -> None:
    group, fold = LinearGroup(("q",), 3), Fold("n", NORM, 0, 3, 3)
    weights = {"n.weight": torch.tensor([0.0, 1.0, 2.0]).half(), "q.weight": torch.ones(2, 3)}

    folded, columns = apply_fold(weights, group, fold, torch.tensor([2.0, 3.0, 4.0]))

    assert torch.isfinite(columns).all()
    assert folded["n.weight"][0] == 0
    torch.testing.assert_close(folded["n.weight"].float() * columns, weights["n.weight"].float())
