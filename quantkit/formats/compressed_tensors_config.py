"""The `quantization_config` of compressed-tensors: schemes of a model to JSON and back. Names and numbers only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quantkit.errors import CheckpointError, UnsupportedScheme
from quantkit.formats.common import REQUANTIZE, compiled, kept, names_in, read_scheme, split_suffixes, typed
from quantkit.scheme import PER_CHANNEL, Scheme

PACK_QUANTIZED, DENSE = "pack-quantized", "dense"
VERSION = "0.20.0"  # the compressed-tensors release whose reader our tests run
_REGEX = "re:"
_LINEAR = "Linear"  # the one class target that names what we read
_FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def write_config(schemes: Mapping[str, Scheme | None], *, fp8_cache: bool = False) -> dict[str, Any]:
    """Describe which linears are packed, and how.

    Without a packed linear only the cache is described, as the library writes it: no group, and format `dense`.

    Args:
        schemes: {"model.layers.0.mlp.down_proj": Scheme(), "lm_head": None}; every linear of the model.
        fp8_cache: the checkpoint holds one scale each for K and for V of every attention module.

    Raises:
        UnsupportedScheme: nothing is packed, and the cache has no scales either.
    """
    groups: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        if scheme is not None:
            groups.setdefault(scheme, []).append(name)
    if not groups and not fp8_cache:
        raise UnsupportedScheme("no linear is packed, and no scales of a KV cache are stored: nothing is to describe")
    return {
        "quant_method": "compressed-tensors",
        "format": PACK_QUANTIZED if groups else DENSE,
        "quantization_status": "compressed" if groups else "frozen",
        "global_compression_ratio": None,
        "kv_cache_scheme": dict(_FP8_CACHE) if fp8_cache else None,
        "version": VERSION,
        "ignore": kept(schemes),
        "config_groups": {
            f"group_{index}": _group(scheme, _targets(names, groups))
            for index, (scheme, names) in enumerate(groups.items())
        },
    }


def read_config(config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    """Turn a config into a function from a linear's full name to its scheme; None means not packed.

    Precedence is the reader's: `ignore`, then the exact name, then a regular expression, then a class.

    Raises:
        CheckpointError: it names a format, ordering or number type that is not read here.
    """
    groups = typed(config, "config_groups", dict)
    _check_whole(config, packed=bool(groups))
    targets: dict[str, Scheme] = {}
    for key, group in groups.items():
        scheme = _read_group(key, group, config.get("format"))
        targets.update(dict.fromkeys(names_in(group, "targets"), scheme))
    # a mixture of experts has tens of thousands of names: only patterns are tried one by one
    ignored = frozenset(names_in(config, "ignore"))
    ignored_patterns = [compiled(each.removeprefix(_REGEX)) for each in ignored if each.startswith(_REGEX)]
    patterns = [
        (compiled(target.removeprefix(_REGEX)), scheme)
        for target, scheme in targets.items()
        if target.startswith(_REGEX)
    ]

    def scheme_of(name: str) -> Scheme | None:
        if ignored & {name, _LINEAR} or any(pattern.match(name) for pattern in ignored_patterns):
            return None
        if name in targets:
            return targets[name]
        found = next((scheme for pattern, scheme in patterns if pattern.match(name)), None)
        return found or targets.get(_LINEAR)

    return scheme_of


def _group(scheme: Scheme, targets: Sequence[str]) -> dict[str, Any]:
    # compat: the reader forbids unknown keys in a group and in its weights; ours go elsewhere
    size = {} if scheme.group_size == PER_CHANNEL else {"group_size": scheme.group_size}
    return {
        "targets": list(targets),
        "weights": {
            "num_bits": scheme.bits,
            "type": "int",
            "symmetric": scheme.symmetric,
            "strategy": "group" if size else "channel",
            **size,
            "dynamic": False,
            "actorder": None,
            "observer": "minmax",
        },
        "input_activations": None,
        "output_activations": None,
    }


def _targets(names: Sequence[str], groups: Mapping[Scheme, Sequence[str]]) -> list[str]:
    """Name the linears of one group, as shortly as no other group's linear is named too.

    compat: vLLM looks a fused module (`qkv_proj`) up by class before it looks at the names of its parts, so a
    class target beside others would take their linears. With several groups, no group uses one.
    """
    if len(groups) == 1:
        return [_LINEAR]
    mine = set(names)
    others = [name for group in groups.values() for name in group if name not in mine]
    said = split_suffixes(names, others)
    return [f"{_REGEX}.*\\.{re.escape(text)}$" if is_suffix else text for text, is_suffix in said.items()]


def _check_whole(config: Mapping[str, Any], *, packed: bool) -> None:
    if config.get("quant_method", "compressed-tensors") != "compressed-tensors":
        raise CheckpointError(f"quantization_config: quant_method `{config['quant_method']}` is not compressed-tensors")
    if packed and config.get("quantization_status", "compressed") != "compressed":
        raise CheckpointError(
            f"quantization_config: status `{config['quantization_status']}`, so the weights are not packed"
        )
    sparsity = typed(config, "sparsity_config", dict)
    if sparsity.get("format", "dense") != "dense":
        raise CheckpointError(
            f"quantization_config: sparse weights (`{sparsity['format']}`) cannot be read", REQUANTIZE
        )
    if typed(config, "transform_config", dict).get("config_groups"):
        raise CheckpointError("quantization_config: rotated weights (`transform_config`) cannot be read", REQUANTIZE)


def _read_group(key: str, group: Any, default_format: str | None) -> Scheme:
    """Read one config group as a Scheme, or say why it is none."""
    where = f"quantization_config group `{key}`"
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise CheckpointError(f"{where} describes no weights")
    kind = group.get("format") or default_format
    if kind != PACK_QUANTIZED:
        raise CheckpointError(f"{where} has format `{kind}`, and only `{PACK_QUANTIZED}` is read", REQUANTIZE)
    weights = group["weights"]
    reason = next(_refusals(group, weights), None)
    if reason:
        raise CheckpointError(f"{where} {reason}", REQUANTIZE)
    per_channel = weights.get("strategy") == "channel" or weights.get("group_size") == PER_CHANNEL
    size = PER_CHANNEL if per_channel else weights["group_size"]
    return read_scheme(where, weights.get("num_bits", 8), size, weights.get("symmetric", True))


def _refusals(group: Mapping[str, Any], weights: Mapping[str, Any]) -> Iterator[str]:
    """Say what this reader cannot represent, most telling first."""
    if weights.get("type", "int") != "int":
        yield f"holds {weights['type']} weights, and only integers are read"
    if str(weights.get("actorder")).lower() in ("group", "dynamic", "true"):
        yield f"has actorder `{weights['actorder']}`, whose groups are not consecutive"
    if group.get("input_activations") or group.get("output_activations"):
        yield "quantizes activations, and only weights are read"
    if not isinstance(weights.get("symmetric", True), bool):
        yield f"has `symmetric` {weights['symmetric']!a}, which is neither true nor false"
    size, strategy = weights.get("group_size"), weights.get("strategy")
    if strategy not in (None, "group", "channel") or (strategy != "channel" and not isinstance(size, int)):
        yield f"has strategy `{strategy}` with group size {size}, and only `group` and `channel` are read"
