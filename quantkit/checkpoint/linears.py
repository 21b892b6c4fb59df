"""Which matrices of a checkpoint are linears of its decoder blocks, from config.json and headers alone."""

from __future__ import annotations

import re

from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError

_INDEXED = re.compile(r"^(.+?)\.(\d+)\.(.+)$")


def find_blocks(source: Checkpoint) -> tuple[str, int]:
    """Name prefix and number of the decoder blocks: the numbered list as long as the config says.

    Raises:
        CheckpointError: the config has no number of layers, or no list of tensors has that many members.
    """
    text = source.config.get("text_config")
    config = source.config | text if isinstance(text, dict) else source.config
    count = next((config[k] for k in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if k in config), None)
    if not isinstance(count, int) or count < 1:
        raise CheckpointError("config.json does not say how many layers the model has", "add `num_hidden_layers`")
    members: dict[str, set[int]] = {}
    matrices: dict[str, int] = {}
    for name, info in source.tensors.items():
        if found := _INDEXED.match(name):
            members.setdefault(found[1], set()).add(int(found[2]))
            matrices[found[1]] = matrices.get(found[1], 0) + info.nbytes
    fitting = [prefix for prefix, seen in members.items() if seen >= set(range(count))]
    if not fitting:
        longest = max(members.items(), key=lambda item: len(item[1]), default=("", set()))
        raise CheckpointError(
            f"no list of tensors in `{source.path}` has the {count} blocks that config.json names"
            + (f"; `{longest[0]}` has {len(longest[1])}" if longest[1] else ""),
            "a shard may be missing, or the config may belong to another model",
        )
    return f"{max(fitting, key=lambda prefix: matrices[prefix])}.", count


def linear_shapes(source: Checkpoint, prefix: str) -> dict[str, tuple[int, int]]:
    """{linear: (out_features, in_features)} of every weight matrix below `prefix`, in the order of the blocks."""
    return {
        name.removesuffix(".weight"): (info.shape[0], info.shape[1])
        for name, info in sorted(source.tensors.items(), key=lambda item: natural(item[0]))
        if name.startswith(prefix) and name.endswith(".weight") and len(info.shape) == 2
    }


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts block 2 before block 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
