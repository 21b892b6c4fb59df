"""One decoder block as a function of its weights and hidden states. The module stays on the meta device for ever.

B rows, T tokens, D hidden; names of weights are relative to the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from quantkit.errors import NumericalError
from quantkit.group import LinearGroup
from quantkit.ops.stats import InputStats

Call = tuple[tuple[Any, ...], dict[str, Any]]  # what the model passes to a block besides the hidden states
Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Block:
    """A decoder block.

    Attributes:
        index: position in the model.
        path: module path in the model, e.g. "model.layers.3".
        module: the block itself, parameters on meta, buffers real.
        tensors: {parameter name in the block: checkpoint tensor name}, with the buffers that the checkpoint stores.
    """

    index: int
    path: str
    module: nn.Module
    tensors: dict[str, str]

    def __call__(self, weights: Weights, hidden: Tensor, call: Call) -> Tensor:
        """Hidden states [B, T, D] after the block, computed with `weights` {parameter name: tensor}."""
        args, kwargs = call
        # its buffers too: `strict`, which tells a forgotten weight, asks for all of them
        given = dict(self.module.named_buffers()) | dict(weights)
        output = functional_call(self.module, given, (hidden, *args), kwargs, strict=True)
        return output[0] if isinstance(output, tuple) else output

    def linears(self) -> dict[str, nn.Linear]:
        """Submodules that are plain linears, by relative name."""
        return {name: module for name, module in self.module.named_modules() if isinstance(module, nn.Linear)}

    def structure(self) -> tuple[Any, ...]:
        """Equal for blocks that differ only in the values of their weights."""
        shapes = tuple((name, tuple(p.shape)) for name, p in self.module.named_parameters())
        return shapes, tuple(type(module).__name__ for module in self.module.modules())

    @torch.no_grad()
    def observe(
        self,
        weights: Weights,
        batches: Iterable[tuple[Tensor, Call]],
        groups: Sequence[LinearGroup],
        device: torch.device,
    ) -> dict[LinearGroup, InputStats]:
        """Statistics of every group's input over all batches of (hidden states, call).

        Raises:
            NumericalError: an input holds a value that is not finite; names the linear.
        """
        stats = {group: InputStats.empty(group.in_features, device) for group in groups}

        def watch(group: LinearGroup) -> Callable[..., None]:
            return lambda module, args: stats[group].add(args[0])

        with hooks(self.module, {group.names[0]: watch(group) for group in groups}):
            for hidden, call in batches:
                self(weights, hidden, call)
        for group, seen in stats.items():
            seen.finish()
            if not bool(torch.isfinite(seen.abs_sum).all() and torch.isfinite(seen.importance).all()):
                raise NumericalError(
                    f"the input of `{self.path}.{group.names[0]}` is not finite during calibration",
                    "check the source weights, or run the forward passes with --dtype float32",
                )
        return stats


@contextmanager
def hooks(module: nn.Module, before: Mapping[str, Callable[..., None]]) -> Iterator[None]:
    """Run `before[name](submodule, args)` ahead of each named submodule's forward."""
    handles = [module.get_submodule(name).register_forward_pre_hook(hook) for name, hook in before.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def captured(module: nn.Module, path: str) -> Iterator[list[tuple[tuple[Any, ...], dict[str, Any], Any]]]:
    """Collect (args, kwargs, output) of each call of the submodule at `path` ("" is the module itself)."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
    handle = module.get_submodule(path).register_forward_hook(
        lambda _, args, kwargs, output: calls.append((args, kwargs, output)), with_kwargs=True
    )
    try:
        yield calls
    finally:
        handle.remove()
