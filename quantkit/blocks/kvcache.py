"""What attention hands to its KV cache: watched, to calibrate scales, or replaced, to simulate a cache of fewer bits.

An attention module hands its keys, rotated already, and its values to the cache that it is given. A cache that keeps
nothing thus sees exactly what an engine stores, and no table of architectures says where to look.

B rows, H key/value heads, T tokens, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from quantkit.blocks.block import Block, Call, Weights
from quantkit.blocks.skeleton import Skeleton
from quantkit.errors import CheckpointError, NumericalError, UnsupportedScheme
from quantkit.formats.kv_cache import E4M3_MAX, CacheScales
from quantkit.ops.fp8 import fake_e4m3

CacheTap = Callable[[str, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes an attention module's checkpoint name, keys and values [B, H, T, D]; returns those that attention shall see."""

# what blocks call the cache among their arguments; it differs between models and versions of transformers
_KEYWORDS = ("cache", "past_key_values", "past_key_value", "layer_past")
# values of a config's `layer_types` whose blocks keep no keys and values
_WITHOUT_CACHE = ("linear_attention", "mamba", "recurrent", "conv", "moe", "mlp")
_HINT = "do without `--kv-cache`"


@dataclass(slots=True)
class CacheObserver:
    """A tap that changes nothing and keeps the largest |K| and |V| of each attention, over all batches and tokens."""

    _largest: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, attention: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.stack([keys.abs().amax().float(), values.abs().amax().float()])
        known = self._largest.get(attention, seen)
        self._largest[attention] = torch.maximum(known, seen)  # which keeps nan
        return keys, values

    @property
    def amax(self) -> dict[str, tuple[float, float]]:
        """{attention: (largest |K|, largest |V|)}."""
        return {name: (float(pair[0]), float(pair[1])) for name, pair in self._largest.items()}

    def scales(self, attentions: Iterable[str]) -> dict[str, CacheScales]:
        """The scales amax / 448 of these attention modules.

        Raises:
            CheckpointError: one of them handed nothing to its cache.
            NumericalError: one of them handed over a value that is not finite.
        """
        amax = self.amax
        if missing := next((name for name in attentions if name not in amax), None):
            raise CheckpointError(f"`{missing}` handed no keys and values to its cache during calibration", _HINT)
        return {name: cache_scales(name, *amax[name]) for name in attentions}


@dataclass(frozen=True, slots=True)
class CacheSimulator:
    """A tap through which attention sees K and V as an FP8 cache gives them back, at {attention: scales}."""

    scales: Mapping[str, CacheScales]

    def __call__(self, attention: str, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        scales = self.scales[attention]
        return fake_e4m3(keys, scales.k), fake_e4m3(values, scales.v)


def cache_scales(attention: str, k: float, v: float) -> CacheScales:
    """Scales that put the largest |K| and |V| of an attention module on 448, the largest number of e4m3.

    A part that is zero throughout gets 1: any scale stores it exactly, and this one engines take where none is given.
    A scale stays within the normal numbers of float32, in which it is stored.

    Raises:
        NumericalError: one of them is not finite.
    """
    for which, amax in (("keys", k), ("values", v)):
        if not math.isfinite(amax):
            raise NumericalError(
                f"the {which} of `{attention}` are not finite during calibration",
                "check the source weights, or run the forward passes with --dtype float32",
            )
    least = torch.finfo(torch.float32).tiny
    return CacheScales(*(max(amax / E4M3_MAX, least) if amax else 1.0 for amax in (k, v)))


def run_tapped(block: Block, weights: Weights, hidden: Tensor, call: Call, tap: CacheTap) -> Tensor:
    """Hidden states [B, T, D] after the block, as `block(weights, hidden, call)` gives them, with a tap on its cache.

    Raises:
        UnsupportedScheme: the block takes no cache.
    """
    return _run(block, weights, hidden, call, lambda path, k, v: tap(_checkpoint_name(block, path), k, v))


def expects_cache(config: Any, index: int) -> bool:
    """Whether the block at `index` keeps keys and values, by the config's `layer_types`; True where it says nothing."""
    kinds = getattr(config.get_text_config(), "layer_types", None)
    return not kinds or kinds[index] not in _WITHOUT_CACHE


@torch.no_grad()
def find_attentions(skeleton: Skeleton) -> dict[str, int]:
    """{attention module, by checkpoint name: block} of every attention that hands keys and values to a cache.

    Found by running one block of each structure on two tokens, without reading a weight.

    Raises:
        UnsupportedScheme: a block that ought to keep keys and values does not, or not as K and V; or no block does.
    """
    config = skeleton.model.config.get_text_config()
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedScheme("the model caches a latent vector for each token, not K and V", _HINT)
    device = next((buffer.device for buffer in skeleton.model.buffers()), torch.device("cpu"))
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    hidden, calls = skeleton.record(_zeros(skeleton.model, skeleton.embedding(), device), ids)
    known: dict[Any, list[str]] = {}
    found: dict[str, int] = {}
    for block in skeleton.blocks:
        expected = expects_cache(config, block.index)
        key = expected, block.structure()
        if key not in known:
            known[key] = _callers(block, hidden, calls[block.index])
        if expected and not known[key]:
            raise UnsupportedScheme(f"`{block.path}` hands no keys and values to a cache", _HINT)
        found |= {_checkpoint_name(block, path): block.index for path in known[key]}
    if not found:
        raise UnsupportedScheme("no layer of the model keeps keys and values", _HINT)
    return found


class _Passing(DynamicCache):
    """A cache that keeps no keys and values but returns the tap's. States of linear attention it keeps.

    Args:
        running: paths of the modules that are running, innermost last; the tap gets the last.
    """

    def __init__(self, config: Any, running: list[str], tap: CacheTap) -> None:
        super().__init__(config=config)
        self._running = running
        self._tap = tap

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._tap(self._running[-1], key_states, value_states)


def _run(block: Block, weights: Weights, hidden: Tensor, call: Call, tap: CacheTap) -> Tensor:
    """Run a block with a new cache; the tap gets paths within the block for names."""
    config = next((module.config for module in block.module.modules() if hasattr(module, "config")), None)
    with _running(block.module) as stack:
        cache = _Passing(config, stack, tap)
        return block(weights, hidden, _with_cache(block, hidden, call, cache))


def _with_cache(block: Block, hidden: Tensor, call: Call, cache: DynamicCache) -> Call:
    """The call with the cache among its arguments, whether the model passes it by place or by name."""
    args, kwargs = call
    if given := next((name for name in _KEYWORDS if name in kwargs), None):
        return args, kwargs | {given: cache}
    accepted = signature(block.module.forward)
    name = next((name for name in _KEYWORDS if name in accepted.parameters), None)
    if name is None:
        raise UnsupportedScheme(f"`{block.path}` takes no KV cache", _HINT)
    bound = accepted.bind(hidden, *args, **kwargs)
    bound.arguments[name] = cache
    return bound.args[1:], bound.kwargs


@contextmanager
def _running(module: nn.Module) -> Iterator[list[str]]:
    """Paths of the submodules that are running, innermost last."""
    stack: list[str] = []

    def enter(path: str) -> Callable[..., None]:
        return lambda *_: stack.append(path)

    def leave(*_: Any) -> None:  # a value would replace the output
        stack.pop()

    handles = [each.register_forward_pre_hook(enter(path)) for path, each in module.named_modules()]
    handles += [each.register_forward_hook(leave) for each in module.modules()]
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()


def _callers(block: Block, hidden: Tensor, call: Call) -> list[str]:
    """Paths, within the block, of the modules that hand keys and values to a cache."""
    observer = CacheObserver()
    names = [name for name, _ in block.module.named_parameters()]
    try:
        _run(block, _zeros(block.module, names, hidden.device), hidden, call, observer)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = (" ".join(str(error).split()) or type(error).__name__)[:300]
        raise UnsupportedScheme(f"`{block.path}` cannot be run with a KV cache: {reason}", _HINT) from error
    return list(observer.amax)


def _zeros(module: nn.Module, names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    """Weights of zeros for those of the names that are parameters.

    Each is one number, seen as a whole tensor; except stacks of experts, whose kernels insist on strides.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    shapes = {name: parameters[name].shape for name in names if name in parameters}

    def zeros(shape: torch.Size) -> Tensor:
        return torch.zeros(shape if len(shape) > 2 else (), device=device).expand(shape)

    return {name: zeros(shape) for name, shape in shapes.items()}


def _checkpoint_name(block: Block, path: str) -> str:
    """What the checkpoint calls the submodule at `path`, going by its parameters."""
    prefix = f"{path}." if path else ""
    inside = {name.removeprefix(prefix): t for name, t in block.tensors.items() if name.startswith(prefix)}
    owners = {tensor.removesuffix(f".{name}") for name, tensor in inside.items() if tensor.endswith(f".{name}")}
    if len(owners) != 1:
        raise UnsupportedScheme(f"the checkpoint has no one name for the attention `{block.path}.{path}`", _HINT)
    return owners.pop()
