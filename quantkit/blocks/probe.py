"""Finding, by running one block on a few random tokens, which linears share an input and where a rescale may be folded.

No table of architectures: linears that read the same storage form a group, and a fold is accepted only when scaling
by random s leaves the block's output unchanged. All of it runs in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from quantkit.blocks.block import Block, Call, captured
from quantkit.blocks.skeleton import Skeleton
from quantkit.group import Fold, FoldKind, LinearGroup, RejectedFold

# numerics: accepted folds were seen to change the output by at most 1e-6 of the block's own contribution, rejected ones
# by at least 1e-3
TOLERANCE = 2e-5
PROBE_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Probe:
    """What one block structure is made of.

    Attributes:
        groups: linears by shared input, in the order they run, each with its proved fold or None.
        rejected: folds that were tried and are wrong.
        unused: linears that did not run on the probe's tokens.
    """

    groups: tuple[LinearGroup, ...]
    rejected: tuple[RejectedFold, ...]
    unused: tuple[str, ...]


@torch.no_grad()
def probe_block(
    block: Block, weights: Mapping[str, Tensor], hidden: Tensor, call: Call, head_dims: tuple[int, int, int]
) -> Probe:
    """Examine a block.

    Args:
        weights: {parameter name: float32 tensor}. Not modified.
        hidden: float32 [1, T, D], a few tokens that enter the block.
        call: how the model calls the block for them.
        head_dims: (query heads, key/value heads, head dimension), used only to propose folds.
    """
    groups, producers = _shared_inputs(block, weights, hidden, call)
    trial = _Trial(block, weights, hidden, call, block(weights, hidden, call))
    proved: list[LinearGroup] = []
    rejected: list[RejectedFold] = []
    for group in groups:
        for fold in _candidates(block, group, producers[group], head_dims):
            change = trial.change(group, fold)
            if change < TOLERANCE:
                group = replace(group, fold=replace(fold, evidence=change))
                break
            rejected.append(RejectedFold(fold.producer, group.names, change))
        proved.append(group)
    ran = {name for group in groups for name in group.names}
    return Probe(tuple(proved), tuple(rejected), tuple(name for name in block.linears() if name not in ran))


class Prober:
    """Probes one block per block structure, on a few random tokens.

    Args:
        outer: {parameter name: tensor} of everything outside the blocks.
    """

    def __init__(self, skeleton: Skeleton, outer: Mapping[str, Tensor]) -> None:
        device = next(iter(outer.values())).device
        vocabulary = skeleton.vocabulary
        ids = torch.randint(0, vocabulary, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
        hidden, calls = skeleton.record(outer, ids.to(device))
        self._hidden = hidden.float()
        self._calls = calls
        self._head_dims = skeleton.head_dims
        self._known: dict[Any, Probe] = {}

    def probe(self, block: Block, weights: Callable[[], Mapping[str, Tensor]]) -> Probe:
        """The probe of this block's structure; `weights` gives the block's weights in float32, if they are needed."""
        structure = block.structure()
        if structure not in self._known:
            call = tree_map(_widened, self._calls[block.index])
            self._known[structure] = probe_block(block, weights(), self._hidden, call, self._head_dims)
        return self._known[structure]


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _shared_inputs(
    block: Block, weights: Mapping[str, Tensor], hidden: Tensor, call: Call
) -> tuple[list[LinearGroup], dict[LinearGroup, str | None]]:
    """Groups in running order, and for each the norm whose output it reads, if any."""
    linears = block.linears()
    readers: dict[tuple[Any, ...], list[str]] = {}
    writers: dict[tuple[Any, ...], str] = {}
    alive: list[Tensor] = []  # a freed storage could come back under the same address

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if name in linears:
                readers.setdefault(_storage(args[0]), []).append(name)
                alive.append(args[0])
            elif isinstance(output, Tensor):
                writers.setdefault(_storage(output), name)
                alive.append(output)

        return hook

    leaves = {n: m for n, m in block.module.named_modules() if not any(m.children()) and list(m.parameters())}
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves.items()]
    try:
        block(weights, hidden, call)
    finally:
        for handle in handles:
            handle.remove()

    groups: list[LinearGroup] = []
    producers: dict[LinearGroup, str | None] = {}
    for storage, names in readers.items():
        unique = tuple(dict.fromkeys(names))
        scope = _common_scope(unique)
        group = LinearGroup(unique, linears[unique[0]].in_features, scope)
        if scope:
            group = replace(group, mixes_tokens=_mixes_tokens(block, weights, hidden, call, group))
        groups.append(group)
        producers[group] = writers.get(storage)
    return groups, producers


def _storage(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape[-1], tensor.numel()


def _common_scope(names: tuple[str, ...]) -> str:
    split = [name.split(".")[:-1] for name in names]
    shared = [parts[0] for parts in zip(*split, strict=False) if len(set(parts)) == 1]
    return ".".join(shared)


def _mixes_tokens(block: Block, weights: Mapping[str, Tensor], hidden: Tensor, call: Call, group: LinearGroup) -> bool:
    """Whether the scope reads the group's input, and its output at some later token depends on that of the first."""
    scope = block.module.get_submodule(group.scope)

    def run(disturb: bool) -> tuple[bool, Tensor]:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not disturb:
                return None
            bent = [_disturbed(value, group.in_features) for value in args]
            return tuple(bent), {key: _disturbed(value, group.in_features) for key, value in kwargs.items()}

        handle = scope.register_forward_pre_hook(before, with_kwargs=True)
        try:
            with captured(block.module, group.scope) as outer, captured(block.module, group.names[0]) as inner:
                block(weights, hidden, call)
        finally:
            handle.remove()
        (args, kwargs, output), (read, _, _) = outer[0], inner[0]
        given = {_storage(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)}
        return _storage(read[0]) in given, output[0] if isinstance(output, tuple) else output

    reads, plain = run(False)
    # any later token, not the last one: with sliding attention the last may not see the first
    return reads and not torch.equal(plain[:, 1:], run(True)[1][:, 1:])


def _disturbed(value: Any, width: int) -> Any:
    """The same value with its first token moved, where it is a tensor [B, T, width]."""
    if not isinstance(value, Tensor) or value.dim() != 3 or value.shape[-1] != width:
        return value
    return torch.cat([value[:, :1] + 1.0, value[:, 1:]], dim=1)


def _candidates(block: Block, group: LinearGroup, norm: str | None, head_dims: tuple[int, int, int]) -> Iterator[Fold]:
    """Folds whose shapes fit; the norm that writes the group's input first."""
    width = group.in_features
    if norm is not None and tuple(getattr(block.module.get_submodule(norm), "weight", torch.empty(0)).shape) == (
        width,
    ):
        for kind in (FoldKind.NORM, FoldKind.NORM_PLUS_ONE):
            yield Fold(norm, kind, 0, width, width)
        return
    heads, key_value, head_dim = head_dims
    for name, linear in block.linears().items():
        if name in group.names:
            continue
        rows = linear.out_features
        if rows >= width:  # all rows, or the last part of a fused projection
            yield Fold(name, FoldKind.LINEAR, rows - width, width, width)
        shared = key_value * head_dim
        if key_value and heads > key_value and width == heads * head_dim and rows in (shared, width + 2 * shared):
            yield Fold(name, FoldKind.LINEAR, rows - shared, shared, head_dim, heads // key_value)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Tries a fold with random s and measures how far the block's output moves."""

    block: Block
    weights: Mapping[str, Tensor]
    hidden: Tensor
    call: Call
    reference: Tensor

    def change(self, group: LinearGroup, fold: Fold) -> float:
        generator = torch.Generator(device="cpu").manual_seed(0)
        s = (torch.rand(fold.channels, generator=generator) + 0.5).to(self.hidden.device)
        folded, _ = apply_fold(self.weights, group, fold, s)
        moved = self.block(folded, self.hidden, self.call) - self.reference
        own = self.reference - self.hidden
        return float(moved.norm() / own.norm().clamp(min=torch.finfo(torch.float32).tiny))


def apply_fold(
    weights: Mapping[str, Tensor], group: LinearGroup, fold: Fold, s: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Divide the producer's output by s and multiply the consumers' input columns; the block's function stays.

    A norm's new weight is rounded to the dtype it is stored in; the consumers then get the ratio that this rounding
    left. Linears come back in float32. So nothing but the quantization itself changes the function, and the rounding
    of a producer's bias.

    Args:
        weights: {parameter name: tensor}. Not modified.
        s: float32 [fold.channels], positive.

    Returns:
        The weights with producer and consumers replaced, and the s that was really folded, per input channel [K].
    """
    changed = dict(weights)
    name = f"{fold.producer}.weight"
    old = weights[name]
    bias = weights.get(f"{fold.producer}.bias")
    rows = slice(fold.start, fold.start + fold.channels)
    if fold.kind is FoldKind.LINEAR:
        changed[name] = old.to(torch.float32, copy=True)
        changed[name][rows] /= s[:, None]
    else:
        one = 1.0 if fold.kind is FoldKind.NORM_PLUS_ONE else 0.0
        scale = old.float() + one
        new = (scale / s - one).to(old.dtype)
        exact = scale / (new.float() + one)
        s = torch.where(torch.isfinite(exact) & (exact > 0), exact, s)
        changed[name] = new
    if bias is not None:
        changed[f"{fold.producer}.bias"] = bias.clone()
        changed[f"{fold.producer}.bias"][rows] = (bias[rows].float() / s).to(bias.dtype)
    columns = fold.expand(s)
    for consumer in group.names:
        changed[f"{consumer}.weight"] = weights[f"{consumer}.weight"].float() * columns
    return changed, columns
