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

# what a model's own code raises over values it did not expect
_UNRUNNABLE = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
# what transformers raises over a config that makes no model: values missing, of another type, or at odds
_UNBUILDABLE = (*_UNRUNNABLE, ArithmeticError, ImportError, OSError, StrictDataclassError, SyntaxError)
_CALL = {"use_cache": False}


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

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def positions(self) -> int | None:
        """Longest row that the model's table of positions has room for; None where positions are computed."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        inputs = self.model.get_input_embeddings()
        tables = [m.weight for m in self.model.modules() if isinstance(m, nn.Embedding) and m is not inputs]
        tables += [buffer for buffer in self.model.buffers() if buffer.dim() == 2]
        # some keep a few rows more, for padding
        fixed = isinstance(limit, int) and any(limit <= len(table) <= limit + 2 for table in tables)
        return limit if fixed else None

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
                functional_call(base, weights, (ids,), _CALL)
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
                logits.append(functional_call(self.model, dict(outer), (ids,), _CALL).logits)
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
    except _UNRUNNABLE as error:  # whatever the model's own code makes of a row where it expects a batch
        if isinstance(error, torch.OutOfMemoryError):
            raise
    try:
        run(lambda *args, **kwargs: (forward(*args, **kwargs),))
    except _UNRUNNABLE as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = (" ".join(str(error).split()) or type(error).__name__)[:300]
        raise CheckpointError(
            f"the model cannot be run block by block: {reason}",
            "it passes something else than hidden states between its blocks, which is not supported",
        ) from error


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
    wanted = parameters | _stored_buffers(model)
    stored = _renamed(model, available)
    tensors = {n: stored[t] for n, t in match_names(wanted, stored, model.base_model_prefix).items()}
    _require_all(parameters, tensors)
    _require_same(wanted, tensors, available)

    prefix = f"{path_of_blocks}."
    blocks = tuple(
        Block(i, path, module, {n.removeprefix(f"{path}."): t for n, t in tensors.items() if n.startswith(f"{path}.")})
        for i, module in enumerate(modules)
        for path in [f"{prefix}{i}"]
    )
    outer = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    return Skeleton(model, blocks, outer, _head_dims(config))


def model_config(path: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """The text model's config with the values that transformers fills in, also under the names it has for all models.

    Raises:
        CheckpointError: transformers does not know the model.
    """
    from transformers import AutoConfig

    with _explained(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
        text = config.get_text_config()
        common = {name: getattr(text, own) for name, own in text.attribute_map.items() if hasattr(text, own)}
        return text.to_dict() | common


def model_shapes(path: Path, *, trust_remote_code: bool = False) -> dict[str, tuple[int, ...]]:
    """{parameter: shape} of the model that config.json describes, tied ones once; takes seconds and no memory.

    Raises:
        CheckpointError: transformers does not know the model, or cannot build it.
    """
    return {name: tuple(p.shape) for name, p in _empty_model(path, trust_remote_code).named_parameters()}


def _empty_model(path: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with _explained(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
        config.return_dict = True  # config.json may say otherwise, and models disagree about what then holds inside
        # a quantized artifact is read by our own formats; its model is the unquantized one
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with warnings.catch_warnings(), init_empty_weights(include_buffers=False):
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, dtype=torch.float32)
        model.tie_weights()  # the empty initialization made every parameter a new object
        return model.eval()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Keep transformers quiet, and turn what it raises over a config into an error of ours."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    try:
        logging.set_verbosity_error()
        yield
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
    if len(outermost) != 1 or count < 1:
        found = ", ".join(name for name, _ in outermost) or "none"
        raise CheckpointError(
            f"the model has no single list of {count} decoder blocks (found: {found})",
            "only decoder-only language models are supported",
        )
    return outermost[0]


def _stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers of numbers that a checkpoint may hold; without a tensor they stay as the model makes them."""
    persistent = model.state_dict().keys()
    return {n: b for n, b in model.named_buffers() if n in persistent and b.is_floating_point()}


def _require_all(parameters: Mapping[str, Tensor], tensors: Mapping[str, str]) -> None:
    missing = [name for name in parameters if name not in tensors]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(parameters)} parameters have no tensor in the checkpoint, such as `{missing[0]}`",
            "the checkpoint may store them fused or split in another way than transformers builds them; "
            "re-save it with transformers' save_pretrained, or check that no shard is missing",
        )


def _require_same(
    parameters: Mapping[str, Tensor], tensors: Mapping[str, str], available: Mapping[str, Shaped | None]
) -> None:
    for name, tensor in tensors.items():
        stored, wanted = available[tensor], list(parameters[name].shape)
        if isinstance(dtype := getattr(stored, "dtype", None), str) and "F" not in dtype:  # as safetensors names it
            raise CheckpointError(
                f"`{tensor}` is {dtype}, and the model has floating-point numbers there",
                "it may be quantized in a way that is not read here; start from the original checkpoint",
            )
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
