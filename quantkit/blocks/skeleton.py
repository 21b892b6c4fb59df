"""The model without its weights: where the decoder blocks are, how the model calls each, what surrounds them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.func import functional_call

from quantkit.blocks.block import Block, Call
from quantkit.blocks.names import match_names
from quantkit.errors import CheckpointError

# what transformers raises over a config that makes no model: values missing, of another type, or at odds
_UNBUILDABLE = (
    *(ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    StrictDataclassError,
)


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A causal language model whose parameters are on the meta device and whose buffers are real.

    Attributes:
        model: the transformers model.
        blocks: its decoder blocks, in order.
        outer: {parameter name in the model: checkpoint tensor name} for everything outside the blocks.
        head_dims: (query heads, key/value heads, head dimension) as the config states them.
    """

    model: Any
    blocks: tuple[Block, ...]
    outer: dict[str, str]
    head_dims: tuple[int, int, int]

    def embedding(self) -> dict[str, str]:
        """The part of `outer` that stands before the blocks, or beside them: all but the head."""
        prefix = f"{self.model.base_model_prefix}."
        within = {name: tensor for name, tensor in self.outer.items() if name.startswith(prefix)}
        return within or self.outer

    def tensors(self) -> dict[str, str]:
        """{parameter name in the model: checkpoint tensor name} of the whole model."""
        inner = {f"{b.path}.{name}": tensor for b in self.blocks for name, tensor in b.tensors.items()}
        return self.outer | inner

    def inside(self) -> set[str]:
        """Checkpoint tensor names of all blocks."""
        return {tensor for block in self.blocks for tensor in block.tensors.values()}

    def linears(self) -> list[str]:
        """Checkpoint names of every plain linear of the model, inside the blocks and outside."""
        tensors = self.tensors()
        found = (f"{name}.weight" for name, module in self.model.named_modules() if isinstance(module, nn.Linear))
        return [tensors[name].removesuffix(".weight") for name in found if name in tensors]

    @torch.no_grad()
    def record(self, outer: Mapping[str, Tensor], ids: Tensor) -> tuple[Tensor, list[Call]]:
        """Embed token ids [B, T] and record how the model would call each block.

        Args:
            outer: {parameter name: tensor} for `self.outer`.

        Returns:
            Hidden states [B, T, D] that enter the first block, and one call per block.
        """
        entered: list[Tensor] = []
        calls: list[Call] = []

        def pass_through(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            entered.append(hidden)
            calls.append((args, kwargs))
            return hidden

        def run(forward: Any) -> bool:
            entered.clear()
            calls.clear()
            with self._replaced(forward):
                functional_call(base, weights, (ids,), {"use_cache": False})
            return all(hidden.shape == entered[0].shape for hidden in entered)

        base = self.model.base_model
        weights = _within(self.model, base, outer)
        _tensor_or_tuple(pass_through, run)
        return entered[0], calls

    @torch.no_grad()
    def logits(self, outer: Mapping[str, Tensor], hidden: Tensor) -> Tensor:
        """Logits [B, T, V] of hidden states [B, T, D] that left the last block, by the model's own final layers.

        These act on each token alone, so any slice of a row may be passed.
        """
        ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        logits: list[Tensor] = []

        def run(forward: Any) -> bool:
            with self._replaced(forward):
                logits.append(functional_call(self.model, dict(outer), (ids,), {"use_cache": False}).logits)
            return logits[-1].shape[:-1] == ids.shape

        _tensor_or_tuple(lambda *_, **__: hidden, run)
        return logits[-1]

    @contextmanager
    def _replaced(self, forward: Any) -> Iterator[None]:
        # An instance attribute shadows `forward` for one call, so that the loop over blocks still sees the block
        # itself with all attributes it may ask for; a wrapper module would hide them.
        for block in self.blocks:
            block.module.forward = forward
        try:
            yield
        finally:
            for block in self.blocks:
                del block.module.forward


def _tensor_or_tuple(forward: Any, run: Any) -> None:
    """Run with blocks that return a tensor; where the model turns out to index a block's result, with 1-tuples."""
    try:
        if run(forward):
            return
    except (IndexError, TypeError, AttributeError):
        pass
    run(lambda *args, **kwargs: (forward(*args, **kwargs),))


class Shaped(Protocol):
    """Something with a shape."""

    @property
    def shape(self) -> Sequence[int]: ...


def build_skeleton(
    path: Path,
    available: Mapping[str, Shaped | None],
    *,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
) -> Skeleton:
    """Build the model of the checkpoint directory `path` without reading a weight.

    Args:
        available: the checkpoint's tensors by name; None where the shape is not known yet.
        device: where its buffers go, and so where it can run.

    Raises:
        CheckpointError: transformers does not know the model, no list of decoder blocks stands out, or a parameter has
            no tensor, or one of another shape.
    """
    model = _empty_model(path, trust_remote_code)
    for module in model.modules():
        module._buffers.update({n: b.to(device) for n, b in module._buffers.items() if b is not None})
    config = model.config.get_text_config()
    path_of_blocks, modules = _find_blocks(model, config.num_hidden_layers)
    parameters = dict(model.named_parameters())
    stored = _renamed(model, available)
    tensors = {n: stored[t] for n, t in match_names(parameters, stored, model.base_model_prefix).items()}
    _require_all(parameters, tensors, available)

    prefix = f"{path_of_blocks}."
    blocks = tuple(
        Block(
            i, f"{prefix}{i}", module, {name: tensors[f"{prefix}{i}.{name}"] for name, _ in module.named_parameters()}
        )
        for i, module in enumerate(modules)
    )
    outer = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    return Skeleton(model, blocks, outer, _head_dims(config))


def _empty_model(path: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    try:
        logging.set_verbosity_error()
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
        # a quantized artifact is read by our own formats; its model is the unquantized one
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with warnings.catch_warnings(), init_empty_weights(include_buffers=False):
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, dtype=torch.float32)
        model.tie_weights()  # the empty initialization made every parameter a new object
        return model.eval()
    except _UNBUILDABLE as error:
        reason = (" ".join(str(error).split()) or type(error).__name__)[:300]
        raise CheckpointError(
            f"the model in `{path}` cannot be built: {reason}",
            "look at `model_type`; a newer transformers may know it; custom code needs `--trust-remote-code`",
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def _renamed(model: Any, available: Collection[str]) -> dict[str, str]:
    """{name as this version of transformers would call it: tensor name}; renames only, no change of a tensor."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renames = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    return {rename_source_key(name, renames, [])[0]: name for name in available}


def _find_blocks(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    # lists inside a block (experts, say) can have the same length; the decoder is the outermost one
    outermost = [(n, m) for n, m in lists if not any(n.startswith(f"{other}.") for other, _ in lists)]
    if len(outermost) != 1:
        found = ", ".join(name for name, _ in outermost) or "none"
        raise CheckpointError(
            f"the model has no single list of {count} decoder blocks (found: {found})",
            "only decoder-only language models are supported",
        )
    return outermost[0]


def _require_all(
    parameters: Mapping[str, Tensor], tensors: dict[str, str], available: Mapping[str, Shaped | None]
) -> None:
    missing = [name for name in parameters if name not in tensors]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(parameters)} parameters have no tensor in the checkpoint, such as `{missing[0]}`",
            "the checkpoint may store them fused or split in another way than transformers builds them; "
            "re-save it with transformers' save_pretrained, or check that no shard is missing",
        )
    for name, tensor in tensors.items():
        stored, wanted = available[tensor], list(parameters[name].shape)
        if stored is not None and list(stored.shape) != wanted:
            raise CheckpointError(
                f"`{tensor}` is {list(stored.shape)}, and the model that config.json describes has {wanted}",
                "the config may belong to another model",
            )


def _head_dims(config: Any) -> tuple[int, int, int]:
    heads = getattr(config, "num_attention_heads", 0) or 0
    key_value = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0)
    return heads, key_value, head_dim


def _within(model: nn.Module, inner: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of `weights` that belong to the submodule `inner`, named from there."""
    prefix = next(name for name, module in model.named_modules() if module is inner)
    dotted = f"{prefix}." if prefix else ""
    return {name.removeprefix(dotted): w for name, w in weights.items() if name.startswith(dotted)}
