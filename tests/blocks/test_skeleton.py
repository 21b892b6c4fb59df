"""Building the model without weights: what is found, and what is refused in words."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo.artifacts import read_all
from zoo.models import EVERY

from quantkit.blocks.skeleton import build_skeleton
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError

Zoo = Callable[..., Path]


@pytest.mark.parametrize("architecture", EVERY)
def test_every_parameter_has_its_tensor(zoo: Zoo, architecture: str) -> None:
    path = zoo(architecture)
    stored = read_all(path)

    skeleton = build_skeleton(path, stored)

    found = skeleton.tensors()
    assert set(found.values()) == set(stored)
    parameters = dict(skeleton.model.named_parameters())
    assert set(found) == set(parameters)
    for name, tensor in found.items():
        assert parameters[name].shape == stored[tensor].shape, name
    assert skeleton.inside() | set(skeleton.outer.values()) == set(stored)
    assert not skeleton.inside() & set(skeleton.outer.values())
    assert all(buffer.device.type == "cpu" for buffer in skeleton.model.buffers())


def copy_with(path: Path, to: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with other values in its config.json; None removes a key."""
    shutil.copytree(path, to)
    config = json.loads((to / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps({key: v for key, v in config.items() if v is not None}))
    return to


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "nothing_like_it"}, "cannot be built"),
        ({"model_type": None, "architectures": None}, "cannot be built"),
        ({"model_type": "t5"}, "cannot be built"),  # known, but no causal language model
        ({"num_hidden_layers": 3}, r"9 of 30 parameters have no tensor in the checkpoint, such as `model.layers.2"),
        ({"num_attention_heads": 3}, r"cannot be built: .*\(64\) is not a multiple of the number of attention heads"),
        ({"num_attention_heads": 0}, "cannot be built"),
        ({"vocab_size": "many"}, "cannot be built"),
        ({"head_dim": -16}, "cannot be built"),
        ({"hidden_act": "no_such_activation"}, "cannot be built"),
    ],
)
def test_a_config_that_builds_nothing_is_refused(
    zoo: Zoo, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = copy_with(zoo("llama"), tmp_path / "m", **changes)

    with pytest.raises(CheckpointError, match=message):
        build_skeleton(path, Checkpoint.open(path).tensors)


def test_a_parameter_without_a_tensor_is_named(zoo: Zoo) -> None:
    tensors = read_all(zoo("llama"))
    del tensors["model.layers.1.mlp.up_proj.weight"]

    with pytest.raises(
        CheckpointError, match=r"1 of 21 parameters .* such as `model\.layers\.1\.mlp\.up_proj\.weight`"
    ):
        build_skeleton(zoo("llama"), tensors)


def test_a_tensor_of_another_shape_is_named(zoo: Zoo) -> None:
    tensors = read_all(zoo("llama"))
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.empty(96, 32)

    message = r"`model\.layers\.1\.mlp\.up_proj\.weight` is \[96, 32\], and the model .* has \[96, 64\]"
    with pytest.raises(CheckpointError, match=message):
        build_skeleton(zoo("llama"), tensors)


def test_a_model_with_two_stacks_of_layers_is_refused(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaModel

    original = LlamaModel.__init__

    def with_another_stack(self: Any, config: Any) -> None:
        original(self, config)
        self.draft = torch.nn.ModuleList(torch.nn.Identity() for _ in range(config.num_hidden_layers))

    monkeypatch.setattr(LlamaModel, "__init__", with_another_stack)

    with pytest.raises(
        CheckpointError, match=r"no single list of 2 decoder blocks \(found: model.layers, model.draft\)"
    ):
        build_skeleton(zoo("llama"), read_all(zoo("llama")))


def test_modelling_code_of_the_checkpoint_is_not_run_unasked(zoo: Zoo, tmp_path: Path) -> None:
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    path = copy_with(zoo("llama"), tmp_path / "m", model_type="own_model", auto_map=code)
    witness = tmp_path / "it_ran"
    (path / "own.py").write_text(f"open({os.fspath(witness)!r}, 'w')\n")

    with pytest.raises(CheckpointError) as refused:
        build_skeleton(path, read_all(path))

    assert "trust" in f"{refused.value.message} {refused.value.hint}"
    assert not witness.exists()


def test_a_checkpoint_saved_from_the_bare_base_model_is_read(zoo: Zoo) -> None:
    path = zoo("gemma")
    stored = {name.removeprefix("model."): tensor for name, tensor in read_all(path).items()}

    skeleton = build_skeleton(path, stored)

    assert set(skeleton.tensors().values()) == set(stored)
    assert skeleton.linears()[0] == "layers.0.self_attn.q_proj"
