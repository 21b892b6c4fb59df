"""A checkpoint, packed or not, as a transformers model that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quantkit.blocks.skeleton import build_skeleton
from quantkit.device import choose_device
from quantkit.weights import WeightSource


def load(
    path: str | Path,
    device: str = "auto",
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Load an artifact as a transformers model with dequantized weights.

    Args:
        path: a checkpoint directory, packed or not.
        device: auto, cpu, cuda or cuda:N.
        dtype: of all floating-point weights; None keeps the dtype of the scales, which is the source model's.

    Returns:
        The transformers causal language model, in evaluation mode.

    Raises:
        CheckpointError: the directory cannot be read or does not hold the whole model.
        ResourceError: there is no such device.
    """
    where = choose_device(device)
    source = WeightSource.open(Path(path))
    skeleton = build_skeleton(Path(path), source.tensors, trust_remote_code=trust_remote_code)
    names = skeleton.tensors()
    model: Any = skeleton.model
    for name, tensor in names.items():
        weight = source.read_for(model, {name: tensor}, dtype)[name].to(where)
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf in module._buffers:
            module._buffers[leaf] = weight
        else:
            module._parameters[leaf] = torch.nn.Parameter(weight, requires_grad=False)
    model.tie_weights()
    return model.to(where)
