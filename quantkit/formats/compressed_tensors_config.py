"""The `quantization_config` of compressed-tensors: schemes of a model to JSON and back. Names and numbers only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quantkit.errors import CheckpointError, UnsupportedScheme
from quantkit.scheme import PER_CHANNEL, Scheme

PACK_QUANTIZED = "pack-quantized"
VERSION = "0.20.0"  # the compressed-tensors release whose reader our tests run
_REGEX = "re:"
_LINEAR = "Linear"  # the one class target that names what we read
_HINT = "requantize it from the 16-bit checkpoint"


def write_config(schemes: Mapping[str, Scheme | None]) -> dict[str, Any]:
    """Describe which linears are packed, and how.

    Args:
        schemes: {"model.layers.0.mlp.down_proj": Scheme(), "lm_head": None}; every linear of the model.
    """
    groups: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        if scheme is not None:
            groups.setdefault(scheme, []).append(name)
    ignore = [name for name, scheme in schemes.items() if scheme is None]
    if not any(name.rpartition(".")[2] == "lm_head" for name in schemes):
        # compat: a tied head has no tensor of its own, yet it is a Linear that the class target would catch
        ignore.append("lm_head")
    return {
        "quant_method": "compressed-tensors",
        "format": PACK_QUANTIZED,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "version": VERSION,
        "ignore": ignore,
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
    _check_whole(config)
    targets: dict[str, Scheme] = {}
    for key, group in _typed(config, "config_groups", dict).items():
        scheme = _read_group(key, group, config.get("format"))
        targets.update(dict.fromkeys(_names(group, "targets"), scheme))
    # a mixture of experts has tens of thousands of names: only patterns are tried one by one
    ignored = frozenset(_names(config, "ignore"))
    ignored_patterns = [_compiled(each) for each in ignored if each.startswith(_REGEX)]
    patterns = [(_compiled(target), scheme) for target, scheme in targets.items() if target.startswith(_REGEX)]

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
    others = {suffix for group in groups.values() for name in group if name not in mine for suffix in _suffixes(name)}
    found: dict[str, None] = {}
    for name in names:
        suffix = next((suffix for suffix in _suffixes(name) if suffix not in others), None)
        found[f"{_REGEX}.*\\.{re.escape(suffix)}$" if suffix else name] = None
    return list(found)


def _suffixes(name: str) -> list[str]:
    """Proper dotted suffixes up to the first number from the right: `down_proj`, `mlp.down_proj`."""
    parts = name.split(".")
    kept: list[str] = []
    for index in range(len(parts) - 1, 0, -1):
        if parts[index].isdigit():
            break
        kept.append(".".join(parts[index:]))
    return kept


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.removeprefix(_REGEX))
    except re.error as problem:
        raise CheckpointError(f"quantization_config: `{pattern}` is not a regular expression: {problem}") from None


def _typed(config: Mapping[str, Any], key: str, kind: type) -> Any:
    """The value of a key, empty where it is missing or null."""
    value = config.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise CheckpointError(f"quantization_config: `{key}` is {value!a:.80}, not a {kind.__name__}", _HINT)
    return value


def _names(config: Mapping[str, Any], key: str) -> list[str]:
    names: list[str] = _typed(config, key, list)
    if odd := [name for name in names if not isinstance(name, str)]:
        raise CheckpointError(f"quantization_config: `{key}` holds {odd[0]!a:.80}, which is no name", _HINT)
    return names


def _check_whole(config: Mapping[str, Any]) -> None:
    if config.get("quant_method", "compressed-tensors") != "compressed-tensors":
        raise CheckpointError(f"quantization_config: quant_method `{config['quant_method']}` is not compressed-tensors")
    if config.get("quantization_status", "compressed") != "compressed":
        raise CheckpointError(
            f"quantization_config: status `{config['quantization_status']}`, so the weights are not packed"
        )
    sparsity = _typed(config, "sparsity_config", dict)
    if sparsity.get("format", "dense") != "dense":
        raise CheckpointError(f"quantization_config: sparse weights (`{sparsity['format']}`) cannot be read", _HINT)
    if _typed(config, "transform_config", dict).get("config_groups"):
        raise CheckpointError("quantization_config: rotated weights (`transform_config`) cannot be read", _HINT)


def _read_group(key: str, group: Any, default_format: str | None) -> Scheme:
    """Read one config group as a Scheme, or say why it is none."""
    where = f"quantization_config group `{key}`"
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise CheckpointError(f"{where} describes no weights")
    kind = group.get("format") or default_format
    if kind != PACK_QUANTIZED:
        raise CheckpointError(f"{where} has format `{kind}`, and only `{PACK_QUANTIZED}` is read", _HINT)
    weights = group["weights"]
    reason = next(_refusals(group, weights), None)
    if reason:
        raise CheckpointError(f"{where} {reason}", _HINT)
    per_channel = weights.get("strategy") == "channel" or weights.get("group_size") == PER_CHANNEL
    try:
        return Scheme(
            bits=weights.get("num_bits", 8),
            group_size=PER_CHANNEL if per_channel else weights["group_size"],
            symmetric=weights.get("symmetric", True),
        )
    except UnsupportedScheme as problem:
        raise CheckpointError(f"{where}: {problem.message}", _HINT) from None


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
