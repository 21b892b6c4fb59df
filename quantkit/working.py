"""One block's weights while they are being quantized: as stored, as folded, as computed with, as written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from quantkit.artifact import Artifact
from quantkit.blocks.block import Block, captured
from quantkit.blocks.probe import apply_fold
from quantkit.blocks.stream import Batch, Stream
from quantkit.checkpoint.dtypes import TORCH_DTYPES
from quantkit.checkpoint.reader import Checkpoint
from quantkit.group import FoldKind, LinearGroup
from quantkit.methods.base import Example, Loss
from quantkit.ops.affine import dequantize
from quantkit.plan import Plan
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import Scheme


class WorkingBlock:
    """The weights of one block on their way from the source to the artifact. Names are relative to the block.

    Args:
        plan: which linears get which scheme.
        device: where everything is computed.
        dtype: of forward passes.

    Attributes:
        schemes: {linear: scheme} of the linears that will be packed.
        scale_dtype: dtype of the stored scales.
    """

    def __init__(self, plan: Plan, block: Block, device: torch.device, dtype: torch.dtype) -> None:
        self.block = block
        self.source: Checkpoint = plan.source
        self.dtype = dtype
        stored = self.source.read(block.tensors.values())
        self._weights = {name: stored[tensor].to(device) for name, tensor in block.tensors.items()}
        self._changed: set[str] = set()
        packed = plan.packed
        self.schemes: dict[str, Scheme] = {
            name: packed[full] for name in block.linears() if (full := self.full_name(name)) in packed
        }
        self.scale_dtype = TORCH_DTYPES[plan.scale_dtype]

    def full_name(self, linear: str) -> str:
        """The checkpoint's name of a linear."""
        return self.block.tensors[f"{linear}.weight"].removesuffix(".weight")

    def float32(self) -> dict[str, Tensor]:
        """Every weight in float32."""
        return {name: weight.float() for name, weight in self._weights.items()}

    def compute(self, quantized: Mapping[str, QuantizedWeight] | None = None) -> dict[str, Tensor]:
        """Every weight in the dtype of forward passes, the quantized ones as an engine would see them."""
        done = quantized or {}
        return {
            name: dequantize(done[linear], self.dtype)
            if (linear := name.removesuffix(".weight")) in done
            else weight.to(self.dtype)
            for name, weight in self._weights.items()
        }

    def linears(self, group: LinearGroup) -> dict[str, Tensor]:
        """The group's weights to be packed, float32 [N, K]."""
        return {name: self.packable_weight(name) for name in group.names if name in self.schemes}

    def packable_weight(self, name: str) -> Tensor:
        """One weight to be packed, float32 [N, K]."""
        return self._weights[f"{name}.weight"].float()

    def packable(self) -> dict[str, Tensor]:
        """Every weight to be packed, float32 [N, K]."""
        return {name: self.packable_weight(name) for name in self.schemes}

    def can_fold(self, group: LinearGroup) -> bool:
        """Whether a proved fold leaves every tensor untouched that must stay byte-equal to the source.

        All consumers must be packed; the producer must be a norm, or a linear that is packed itself.
        """
        fold = group.fold
        if fold is None or not all(name in self.schemes for name in group.names):
            return False
        return fold.kind is not FoldKind.LINEAR or fold.producer in self.schemes

    def fold(self, group: LinearGroup, s: Tensor) -> Tensor:
        """Fold s [channels] and return what was really folded, per input channel [K]."""
        assert group.fold is not None
        before = self._weights
        self._weights, columns = apply_fold(before, group, group.fold, s)
        self._changed |= {name for name, weight in self._weights.items() if weight is not before[name]}
        return columns

    def loss(self, group: LinearGroup, stream: Stream) -> Loss | None:
        """Error of the attention that reads the group's input, over the first batch; None where no attention follows.

        A linear whose output goes through a softmax over tokens is judged by what comes out of it.
        """
        if not group.mixes_tokens:
            return None
        scope = self.block.module.get_submodule(group.scope)
        inside = f"{group.scope}."
        weights: dict[str, Tensor] = dict(scope.named_buffers())
        seen: list[Any] = []

        def error(candidate: Mapping[str, Tensor]) -> float:
            if not seen:  # only methods that ask for the loss pay for it
                whole = self.compute()
                weights.update({n.removeprefix(inside): w for n, w in whole.items() if n.startswith(inside)})
                with captured(self.block.module, group.scope) as calls:
                    self.block(whole, *next(stream.inputs(self.block)))
                seen.extend(calls[:1])
            args, kwargs, reference = seen[0]
            replaced = {f"{n.removeprefix(inside)}.weight": w.to(self.dtype) for n, w in candidate.items()}
            output = functional_call(scope, weights | replaced, args, kwargs, strict=True)
            return float((_first(output).float() - _first(reference).float()).square_().sum())

        return error

    def examples(self, stream: Stream) -> list[Example]:
        """Every batch of `stream` as a method tunes on it: the quantized input, the full-precision output."""
        weights = self.compute()

        def run(batch: Batch, replaced: Mapping[str, Tensor]) -> Tensor:
            named = {f"{name}.weight": w.to(self.dtype) for name, w in replaced.items()}
            return self.block(weights | named, batch.hidden.to(stream.device), batch.calls[self.block.index])

        return [
            Example(partial(run, batch), batch.reference.to(stream.device))
            for batch in stream.batches
            if batch.reference is not None
        ]

    def unreached(self, groups: Sequence[LinearGroup]) -> dict[str, Tensor]:
        """Weights to be packed, float32, of linears that are in no group because no token reached them."""
        reached = {name for group in groups for name in group.names}
        return {name: self.packable_weight(name) for name in self.schemes if name not in reached}

    def write(self, artifacts: Sequence[Artifact], quantized: Mapping[str, QuantizedWeight]) -> int:
        """Write the block to every artifact: packed linears, what a fold changed, the bytes of everything else.

        Returns:
            How many tensors a fold rewrote.
        """
        packed, copied, rewritten = {}, [], {}
        for name, tensor in self.block.tensors.items():
            linear = name.removesuffix(".weight")
            if linear in quantized:
                packed[self.full_name(linear)] = quantized[linear]
            elif name in self._changed:
                rewritten[tensor] = self._weights[name]
            else:
                copied.append(tensor)
        for artifact in artifacts:
            artifact.pack(packed)
            artifact.write(rewritten, self.source, copied)
        return len(rewritten)


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
