"""What a conversion will write, and what it refuses. Reads everything of the source but its codes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantkit.blocks.kvcache import find_attentions
from quantkit.blocks.skeleton import Skeleton, build_skeleton
from quantkit.checkpoint.layout import TensorSpec
from quantkit.checkpoint.linears import natural
from quantkit.checkpoint.locate import read_json_object
from quantkit.errors import CheckpointError, UnsupportedScheme, UsageError
from quantkit.events import Emit, Note, ignore
from quantkit.formats import Format
from quantkit.formats.base import stored_dtype
from quantkit.formats.kv_cache import CacheScales
from quantkit.formats.scales import Moved, cast_scale
from quantkit.scheme import Scheme
from quantkit.weights import CONFIG_KEYS, WeightSource

RECORD_FILE = "quantkit.json"
_OTHER = "choose another `--format`, or quantize the 16-bit checkpoint again"


@dataclass(frozen=True, slots=True)
class Conversion:
    """What will be written. All of the source but its codes was looked at.

    Attributes:
        source: the packed checkpoint.
        name: of its folder, or on the hub.
        target: the new format.
        schemes: {linear: scheme} of the packed linears, as they will be written.
        shapes: {linear: (out_features, in_features)} of the same.
        quantization: the new `quantization_config`.
        moved: scales that the new format cannot store as they are.
        cache: {attention module: scales} of an FP8 KV cache.
        layers: {attention module: block} of the same.
        record: the source's quantkit.json, {} where it has none.
    """

    source: WeightSource
    name: str
    target: Format
    schemes: dict[str, Scheme]
    shapes: dict[str, tuple[int, int]]
    quantization: dict[str, Any]
    moved: Moved
    cache: dict[str, CacheScales]
    layers: dict[str, int]
    record: dict[str, Any]

    @property
    def order(self) -> list[str]:
        """Every tensor of the plain model, in the order that fills the shards."""
        return sorted(self.source.tensors, key=natural)

    def scale_dtype(self, linear: str) -> str:
        """Safetensors dtype in which the scales of a packed linear will be stored."""
        return stored_dtype(self.target, self.source.scale_dtype(linear))

    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor of the output; the scales of the cache come last."""
        specs: list[TensorSpec] = []
        for name in self.order:
            info, linear = self.source.tensors[name], name.removesuffix(".weight")
            if info is None:
                parts = self.target.specs(linear, self.schemes[linear], self.shapes[linear], self.scale_dtype(linear))
                specs += [TensorSpec(part, dtype, shape) for part, (dtype, shape) in parts.items()]
            else:
                specs.append(TensorSpec(name, info.dtype, info.shape))
        scales = [self.target.cache_specs(attention).items() for attention in self.cache]
        return (*specs, *(TensorSpec(name, dtype, shape) for each in scales for name, (dtype, shape) in each))

    def cache_by_layer(self) -> dict[int, CacheScales]:
        """{block: scales of its cache}; where a block has several attentions, the largest."""
        layers: dict[int, CacheScales] = {}
        for attention, each in self.cache.items():
            before = layers.get(self.layers[attention], each)
            layers[self.layers[attention]] = CacheScales(max(before.k, each.k), max(before.v, each.v))
        return layers


def plan_conversion(
    source: WeightSource, name: str, target: Format, *, trust_remote_code: bool = False, emit: Emit = ignore
) -> Conversion:
    """Look at everything of a packed checkpoint but its codes, and decide what becomes of it.

    Raises:
        UsageError, UnsupportedScheme, CheckpointError: as `convert`.
    """
    record_file = source.checkpoint.path / RECORD_FILE
    record: dict[str, Any] = dict(read_json_object(record_file)) if record_file.is_file() else {}
    cache = source.cache_scales() or _recorded_cache(record)
    _require_packed(source, name, target, cache)
    shapes = {linear: source.shape(linear) for linear in source.schemes}
    _require_change(source, name, target, shapes)
    for linear, scheme in source.schemes.items():
        _require_shape(target, linear, scheme, shapes[linear])
    schemes, moved = _survey(source, target, shapes, emit)
    skeleton = build_skeleton(source.checkpoint.path, source.tensors, trust_remote_code=trust_remote_code)
    quantization = target.config(_assignment(source, skeleton, schemes), fp8_cache=bool(cache))
    layers = _cache_layers(source, skeleton, cache)
    if cache and not any(map(target.cache_specs, cache)):
        emit(
            Note(
                f"`{target.name}` has no place for the scales of an FP8 KV cache: of all engines only SGLang gets them,"
                " from kv_cache_scales.tp*.json"
            )
        )
    return Conversion(source, name, target, schemes, shapes, quantization, moved, cache, layers, record)


def _require_packed(source: WeightSource, name: str, target: Format, cache: Mapping[str, CacheScales]) -> None:
    if not source.schemes and not cache:
        raise UsageError(
            f"`{name}` is not quantized, and `convert` only translates",
            f"quantize it with `quantkit quantize --format {target.name}`",
        )
    kind = _other_cache(source.config)
    if kind and cache:
        raise CheckpointError(f"the KV cache of `{name}` is {kind}, and only FP8 with fixed scales is read", _OTHER)


def _recorded_cache(record: Mapping[str, Any]) -> dict[str, CacheScales]:
    """{attention module: scales} of a quantkit.json: where a format has no place for them, they are kept there."""
    recorded = record.get("kv_cache")
    found: dict[str, CacheScales] = {}
    for attention, each in recorded.items() if isinstance(recorded, dict) else ():
        k, v = (each.get("k"), each.get("v")) if isinstance(each, dict) else (None, None)
        if not (isinstance(k, float) and isinstance(v, float) and 0 < min(k, v) <= max(k, v) < math.inf):
            raise CheckpointError(
                f"`{RECORD_FILE}` gives `{attention}` scales of its KV cache that are none", "copy the source again"
            )
        found[attention] = CacheScales(k, v)
    return found


def _other_cache(config: Mapping[str, Any]) -> str:
    """How a KV cache is described that is not FP8 with fixed scales, or ""."""
    nested = config.get("quantization")
    algorithm = (nested if isinstance(nested, dict) else config).get("kv_cache_quant_algo")
    scheme = config.get("kv_cache_scheme")
    if algorithm not in (None, "FP8"):
        return f"`{algorithm}`"
    fp8 = {"type": "float", "num_bits": 8, "dynamic": False}
    if isinstance(scheme, dict) and any(scheme.get(key, value) != value for key, value in fp8.items()):
        return f"{scheme.get('num_bits')}-bit `{scheme.get('type')}`"
    return ""


def _require_change(source: WeightSource, name: str, target: Format, shapes: Mapping[str, tuple[int, int]]) -> None:
    """Refuse a source that is laid out as it would be written, in a config.json that says so."""
    if source.format != target or not source.checkpoint.config.get(CONFIG_KEYS[0]):
        return
    stored = source.checkpoint.tensors
    for linear, scheme in source.schemes.items():
        specs = target.specs(linear, scheme, shapes[linear], stored_dtype(target, source.scale_dtype(linear)))
        if any(part not in stored or (stored[part].dtype, stored[part].shape) != each for part, each in specs.items()):
            return
    raise UsageError(f"`{name}` is in `{target.name}` already", "use it as it is, or choose another `--format`")


def _require_shape(target: Format, linear: str, scheme: Scheme, shape: tuple[int, int]) -> None:
    """Refuse what the config and the headers tell; zero points may turn out to suit any format."""
    try:
        target.check(scheme, shape, least_zero=scheme.qmax)
    except UnsupportedScheme:
        _check(target, linear, replace(scheme, symmetric=True), shape)


def _check(target: Format, linear: str, scheme: Scheme, shape: tuple[int, int], least_zero: int = 0) -> None:
    try:
        target.check(scheme, shape, least_zero=least_zero)
    except UnsupportedScheme as error:
        # the format's own hint speaks of options of `quantize`
        raise UnsupportedScheme(f"`{linear}`: {error.message}", _OTHER) from None


def _survey(
    source: WeightSource, target: Format, shapes: Mapping[str, tuple[int, int]], emit: Emit
) -> tuple[dict[str, Scheme], Moved]:
    """Read everything but the codes; returns the schemes to be written, and what becomes of the scales.

    Asymmetric linears whose zero points all are in the middle are symmetric ones: AWQ has no other way to say so.
    """
    least: dict[str, int] = {}
    free: list[str] = []  # linears with a zero point that is not in the middle
    moved = Moved()
    for linear, scheme in source.schemes.items():
        q = source.outline(linear)
        if tuple(q.codes.shape) != shapes[linear]:
            raise CheckpointError(f"`{linear}` is {list(q.codes.shape)}, and its parts are of {list(shapes[linear])}")
        if q.g_idx is not None:
            raise UnsupportedScheme(
                f"`{linear}` has groups that are not consecutive (`desc_act`), which `{target.name}` cannot say",
                "use it as it is, or quantize the 16-bit checkpoint again",
            )
        cast = cast_scale(linear, q, stored_dtype(target, source.scale_dtype(linear)))
        moved = moved.plus(linear, q.scale, cast.scale)
        least[linear] = int(q.zero_point.min())
        if not scheme.symmetric and bool((q.zero_point != scheme.midpoint).any()):
            free.append(linear)
    schemes = dict(source.schemes)
    if not free and not all(scheme.symmetric for scheme in schemes.values()):
        emit(Note("all zero points are in the middle: the linears are symmetric, and written as such"))
        schemes = {linear: replace(scheme, symmetric=True) for linear, scheme in schemes.items()}
    for linear in (*free, *(schemes.keys() - set(free))):
        _check(target, linear, schemes[linear], shapes[linear], least[linear])
    return schemes, moved


def _assignment(source: WeightSource, skeleton: Skeleton, schemes: Mapping[str, Scheme]) -> dict[str, Scheme | None]:
    """{linear: scheme, or None for one that is kept} of the model, and of parts that its text model leaves out."""
    used = set(skeleton.tensors().values())
    beside = [
        name.removesuffix(".weight")
        for name, info in source.tensors.items()
        if info is not None and name not in used and name.endswith(".weight") and len(info.shape) == 2
    ]
    return {name: schemes.get(name) for name in (*skeleton.linears(), *schemes, *beside)}


def _cache_layers(source: WeightSource, skeleton: Skeleton, cache: Mapping[str, CacheScales]) -> dict[str, int]:
    """{attention module: block} of those that have scales, which must be all or none."""
    if not cache:
        return {}
    layers = find_attentions(skeleton)
    for attention in sorted(cache.keys() ^ layers.keys()):
        lacks = "has scales of a KV cache, and is no attention of the model"
        if attention in layers:
            lacks = "has no scales of its KV cache, and others have"
        raise CheckpointError(f"`{attention}` {lacks}", f"`{source.checkpoint.path}` was not written completely")
    return {attention: layers[attention] for attention in cache}
