"""The sizes of a model: from config.json and safetensors headers, or from config.json alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.header import TensorInfo
from quantkit.checkpoint.linears import find_blocks
from quantkit.checkpoint.locate import read_json_object
from quantkit.checkpoint.reader import CONFIG_FILE, Checkpoint
from quantkit.errors import CheckpointError, UsageError
from quantkit.fit.serving import CacheShape, Footprint, Routing, Sizes
from quantkit.scheme import Scheme
from quantkit.weights import WeightSource

# layers of `layer_types` that keep a state of a fixed size, or nothing, instead of keys and values
_STATE_LAYERS = ("linear_attention", "mamba", "mamba2", "conv", "recurrent", "mlp", "moe")
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


@dataclass(frozen=True, slots=True)
class _Part:
    """A weight of the plain model: its shape, where it stands, and the bytes it has in the file."""

    name: str
    shape: tuple[int, ...]
    place: str
    elements: int
    stored: int


def measure(path: Path, scheme: Scheme | None = None, *, trust_remote_code: bool = False) -> Sizes:
    """Size the model in a folder, from headers if it has weights and else from config.json alone.

    Args:
        scheme: of the quantized weights; None is the default one, or what an artifact has.

    Raises:
        CheckpointError: it cannot be read, or its config says too little.
        UsageError: there is no such folder, or a scheme is given for an artifact.
    """
    if not (path / CONFIG_FILE).is_file():
        raise UsageError(f"`{path}` is no folder with a {CONFIG_FILE}", "download it; the weights are not needed")
    stored = any(path.glob("*.safetensors"))
    source = WeightSource.open(path) if stored else _without_weights(path, trust_remote_code)
    if source.format and scheme:
        raise UsageError(
            f"`{path}` is quantized already, so its scheme is known",
            "leave out `--bits`, `--group-size` and `--symmetric/--asymmetric`",
        )
    config, notes = _config(path, source.checkpoint.config, trust_remote_code)
    routing, cache = _routing(config), cache_shape(config)
    parts = _parts(source, config)
    if source.format:
        label, packing = "as stored", ", ".join(dict.fromkeys(map(str, source.schemes.values())))
        quantized = _footprint(parts, lambda part: part.stored)
    else:
        scheme = scheme or Scheme()
        label, packing = f"{scheme.bits}-bit", str(scheme)
        quantized = _footprint(parts, lambda part: _packed_bytes(part, scheme, routing))
        notes += _untiled(parts, scheme, routing)
    if not stored and source.checkpoint.config.get("quantization_config"):
        notes.append(f"{CONFIG_FILE} describes a quantized model; without its weights, the plain one is sized")
    return Sizes(
        sum(part.elements for part in parts),
        {"16-bit": _footprint(parts, lambda part: 2 * part.elements), label: quantized},
        packing,
        cache,
        _number(config, "num_attention_heads"),
        routing,
        config.get("max_position_embeddings"),
        (*notes, *_cache_notes(config, cache)),
    )


def cache_shape(config: Mapping[str, Any]) -> CacheShape:
    """Read the shape of the KV cache from a text model's config.

    Raises:
        CheckpointError: the config lacks a number, or no layer keeps keys and values.
    """
    kinds = config.get("layer_types")
    if not kinds:
        everywhere = config.get("sliding_window") and config.get("use_sliding_window", True)
        kinds = ["sliding_attention" if everywhere else "full_attention"] * _number(config, "num_hidden_layers")
    layers: dict[int | None, int] = {}
    for kind in kinds:
        if kind not in _STATE_LAYERS:
            window = config.get(_WINDOWS.get(kind, ""))
            layers[window] = layers.get(window, 0) + 1
    if not layers:
        raise CheckpointError("no layer of this model keeps keys and values", "its memory cannot be stated here")
    if config.get("kv_lora_rank"):
        return CacheShape(layers, 1, config["kv_lora_rank"] + _number(config, "qk_rope_head_dim"))
    heads = _number(config, "num_attention_heads")
    shared = config.get("multi_query") and not config.get("new_decoder_architecture")
    key_value = 1 if shared else config.get("num_key_value_heads") or config.get("num_kv_heads") or heads
    return CacheShape(layers, key_value, 2 * (config.get("head_dim") or _number(config, "hidden_size") // heads))


def _without_weights(path: Path, trust_remote_code: bool) -> WeightSource:
    """The checkpoint that config.json describes, as if it were stored in 16 bit."""
    from quantkit.blocks.skeleton import model_shapes  # transformers takes seconds to import

    shapes = model_shapes(path, trust_remote_code=trust_remote_code)
    tensors = {name: TensorInfo(name, "BF16", shape, "", 0, 2 * math.prod(shape)) for name, shape in shapes.items()}
    checkpoint = Checkpoint(path, read_json_object(path / CONFIG_FILE), tensors, (), "")
    return WeightSource(checkpoint, None, {}, dict(tensors))


def _config(path: Path, raw: Mapping[str, Any], trust_remote_code: bool) -> tuple[dict[str, Any], list[str]]:
    from quantkit.blocks.skeleton import model_config  # transformers takes seconds to import

    try:
        return model_config(path, trust_remote_code=trust_remote_code), []
    except CheckpointError:
        text = raw.get("text_config")
        kind = raw.get("model_type")
        note = (
            f"transformers does not know `{kind}`, so {CONFIG_FILE} is taken literally; what it leaves out is missing"
        )
        return {**raw, **(text if isinstance(text, dict) else {})}, [note]


def _parts(source: WeightSource, config: Mapping[str, Any]) -> list[_Part]:
    """Every weight once; a linear's packed tensors are parts of their own, the codes counting as its elements."""
    prefix, _ = find_blocks(source.checkpoint)
    tensors = source.checkpoint.tensors
    vocabulary = _number(config, "vocab_size")
    tables = [
        name
        for name, info in tensors.items()
        if len(info.shape) == 2 and info.shape[0] >= vocabulary and not name.startswith(prefix)
    ]
    # embedding first; a checkpoint may hold a tied head twice
    tables.sort(key=lambda name: "head" in name or "out" in name)
    tied = len(tables) < 2 or config.get("tie_word_embeddings")
    if tied:
        tensors = {name: info for name, info in tensors.items() if name not in tables[1:]}
    head = tables[0] if tied and tables else tables[-1] if tables else ""
    return [
        _Part(name, info.shape, _place(name, prefix, head), _elements(source, info), info.nbytes)
        for name, info in tensors.items()
    ]


def _place(name: str, prefix: str, head: str) -> str:
    if not name.startswith(prefix):
        return "head" if name == head else "other"
    return "experts" if "experts" in name.split(".") else "blocks"


def _elements(source: WeightSource, info: TensorInfo) -> int:
    linear, _, leaf = info.name.rpartition(".")
    if source.format and linear in source.schemes and leaf in source.format.suffixes:
        return info.nbytes * 8 // source.schemes[linear].bits if leaf == source.format.suffixes[0] else 0
    return math.prod(info.shape)


def _is_linear(part: _Part, routing: Routing | None) -> bool:
    """Whether it is quantized: a matrix of the blocks, or a stack of those of experts; routers are not."""
    stack = len(part.shape) == 3 and part.place == "experts"
    matrix = len(part.shape) == 2 and part.place in ("blocks", "experts") and part.name.endswith(".weight")
    router = routing is not None and part.shape[:1] == (routing.experts,)
    return stack or (matrix and not router)


def _packed_bytes(part: _Part, scheme: Scheme, routing: Routing | None) -> int:
    """Bytes of codes, 16-bit scales and, where they are free, zero points as wide as a code; 16 bit for the rest."""
    if not _is_linear(part, routing) or not scheme.fits(part.shape[-1]):
        return 2 * part.elements
    groups = part.elements // scheme.group(part.shape[-1])
    return (part.elements + (0 if scheme.symmetric else groups)) * scheme.bits // 8 + 2 * groups


def _untiled(parts: Iterable[_Part], scheme: Scheme, routing: Routing | None) -> Iterator[str]:
    left = [part.name for part in parts if _is_linear(part, routing) and not scheme.fits(part.shape[-1])]
    if left:
        yield (
            f"groups of {scheme.group_size} do not tile the inputs of {len(left)} linears, such as `{left[0]}`;"
            " these are counted in 16 bit"
        )


def _footprint(parts: Iterable[_Part], size: Callable[[_Part], int]) -> Footprint:
    sums = dict.fromkeys(("blocks", "experts", "head", "other", "vectors"), 0)
    for part in parts:
        sums[part.place] += size(part)
        sums["vectors"] += size(part) if len(part.shape) < 2 else 0
    return Footprint(sums["blocks"] + sums["experts"], sums["experts"], sums["head"], sums["other"], sums["vectors"])


def _routing(config: Mapping[str, Any]) -> Routing | None:
    experts = _first(config, ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"))
    active = _first(config, ("num_experts_per_tok", "moe_topk", "moe_k"))
    return Routing(experts, active) if experts > active > 0 else None


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int:
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)


def _number(config: Mapping[str, Any], name: str) -> int:
    if not isinstance(config.get(name), int) or config[name] < 1:
        raise CheckpointError(f"{CONFIG_FILE} has no `{name}`", "add it; the model's documentation should state it")
    return int(config[name])


def _cache_notes(config: Mapping[str, Any], cache: CacheShape) -> Iterator[str]:
    for window, count in cache.layers.items():
        if window is not None:
            yield f"{count} layers keep at most the last {window:,} tokens, in engines that free what slid out of it"
    if stateful := sum(kind in _STATE_LAYERS for kind in config.get("layer_types") or ()):
        yield f"{stateful} layers keep a state of a fixed size instead of keys and values; it is not counted"
    if config.get("num_kv_shared_layers"):
        yield f"{config['num_kv_shared_layers']} layers may share the cache of others; each is counted with its own"
