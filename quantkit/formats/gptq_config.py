"""The `quantization_config` of GPTQ: schemes of a model to JSON and back. Names and numbers only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from quantkit import __version__
from quantkit.errors import CheckpointError, UnsupportedScheme
from quantkit.formats.common import REQUANTIZE, compiled, holds_any, is_head, read_scheme, split_suffixes, typed
from quantkit.scheme import Scheme

VERSIONS = {"gptq": 1, "gptq_v2": 0}  # checkpoint_format: what is subtracted from a zero point
_SKIP, _OVERRIDE = "-:", "+:"
_FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.")


def zero_offset_of(config: Mapping[str, Any]) -> int | None:
    """What a checkpoint subtracts from its zero points; None where it is packed in a way that is not read here."""
    found = config.get("checkpoint_format") or config.get("format") or "gptq"
    return VERSIONS.get(found) if isinstance(found, str) else None


def write_config(schemes: Mapping[str, Scheme | None], zero_offset: int) -> dict[str, Any]:
    """Describe which linears are packed, and how.

    The most common scheme is said at the top; rules under `dynamic` say what differs, the first that matches counts.

    Args:
        schemes: {"model.layers.0.mlp.down_proj": Scheme(), "lm_head": None}; every linear of the model.

    Raises:
        UnsupportedScheme: nothing is packed, or symmetric and asymmetric linears stand beside each other.
    """
    packed = {name: scheme for name, scheme in schemes.items() if scheme is not None}
    if not packed:
        raise UnsupportedScheme("no linear is packed, and `gptq` describes nothing else")
    if len({scheme.symmetric for scheme in packed.values()}) > 1:
        raise UnsupportedScheme(
            "symmetric and asymmetric linears stand beside each other, which `gptq` cannot say",
            "use `--format compressed-tensors`, or one symmetry for all linears",
        )
    base = Counter(packed.values()).most_common(1)[0][0]
    dynamic = _dynamic(schemes, base)
    return {
        "quant_method": "gptq",
        "checkpoint_format": next(name for name, offset in VERSIONS.items() if offset == zero_offset),
        "bits": base.bits,
        "group_size": base.group_size,
        "desc_act": False,
        "sym": base.symmetric,
        "lm_head": any(is_head(name) for name in packed),
        "true_sequential": True,
        "pack_dtype": "int32",
        **({"dynamic": dynamic} if dynamic else {}),
        "meta": {"quantizer": [f"quantkit:{__version__}"]},
    }


def read_config(config: Mapping[str, Any], zero_offset: int) -> Callable[[str], Scheme | None]:
    """Turn a config into a function from a linear's full name to its scheme; None means not packed.

    Raises:
        CheckpointError: it names a layout, a width or a rule that is not read here, or another version.
    """
    _check_whole(config, zero_offset)
    base = _scheme(config)
    rules = [_rule(config, key, changes) for key, changes in typed(config, "dynamic", dict).items()]
    only = frozenset(_flat(typed(config, "modules_in_block_to_quantize", list)))
    is_listed = holds_any(only)
    with_head = bool(config.get("lm_head"))

    def scheme_of(name: str) -> Scheme | None:
        for pattern, scheme in rules:
            if pattern.match(name):
                return scheme
        if is_head(name):
            return base if with_head else None
        return base if not only or is_listed(name) else None

    return scheme_of


def _dynamic(schemes: Mapping[str, Scheme | None], base: Scheme) -> dict[str, dict[str, int]]:
    """Rules for the linears that differ from `base`; the head needs none, since `lm_head` speaks of it."""
    names: dict[Scheme | None, list[str]] = {None: []}
    for name, scheme in schemes.items():
        if not is_head(name):
            names.setdefault(scheme, []).append(name)
    rules: dict[str, dict[str, int]] = {}
    for scheme, mine in names.items():
        if scheme != base:
            others = [name for name in schemes if schemes[name] != scheme and not is_head(name)]
            changes = {"bits": scheme.bits, "group_size": scheme.group_size} if scheme else {}
            sign = _OVERRIDE if scheme else _SKIP
            rules |= {f"{sign}{pattern}": changes for pattern in _patterns(mine, others)}
    return rules


def _patterns(names: Collection[str], others: Collection[str]) -> list[str]:
    """Regular expressions for `names` that match none of `others`, also as engines call them.

    compat: vLLM and SGLang try the rules on the modules that they build, where q, k and v are one, gate and up are one,
    and all experts of a block are one.
    """
    built_of_others = {_built(name) for name in others}
    built = [each for name in names if (each := _built(name)) not in built_of_others]
    said = split_suffixes(dict.fromkeys([*names, *built]), {*others, *built_of_others})
    return [f".*\\.{re.escape(text)}$" if is_suffix else f"{re.escape(text)}$" for text, is_suffix in said.items()]


def _built(name: str) -> str:
    """Name of the module that an engine builds for a linear."""
    if expert := _EXPERT.match(name):
        return expert.group(1)
    parent, dot, leaf = name.rpartition(".")
    return f"{parent}{dot}{_FUSED.get(leaf, leaf)}"


def _check_whole(config: Mapping[str, Any], zero_offset: int) -> None:
    if config.get("quant_method", "gptq") != "gptq":
        raise CheckpointError(f"quantization_config: quant_method `{config['quant_method']}` is not gptq")
    kind = config.get("checkpoint_format") or config.get("format") or "gptq"
    found = zero_offset_of(config)
    if found is None or config.get("is_marlin_format"):
        shown = "marlin" if found is not None else kind
        raise CheckpointError(
            f"quantization_config: checkpoint_format `{shown}` is not read here, only {' and '.join(VERSIONS)}",
            REQUANTIZE,
        )
    if found != zero_offset:
        raise CheckpointError(f"quantization_config: checkpoint_format `{kind}` has other zero points than are read")


def _scheme(config: Mapping[str, Any]) -> Scheme:
    pack_dtype = config.get("pack_dtype") or "int32"
    if pack_dtype != "int32":
        raise CheckpointError(
            f"quantization_config: pack_dtype `{pack_dtype}` is not read here, only int32", REQUANTIZE
        )
    return read_scheme("quantization_config", config.get("bits"), config.get("group_size"), config.get("sym", True))


def _rule(config: Mapping[str, Any], key: str, changes: Any) -> tuple[re.Pattern[str], Scheme | None]:
    """A rule's pattern, and the scheme it gives; without a sign it is an override."""
    if key.startswith(_SKIP):
        return compiled(key.removeprefix(_SKIP)), None
    if not isinstance(changes, Mapping):
        raise CheckpointError(f"quantization_config: `dynamic` gives `{key}` {changes!a:.80}, not a dict", REQUANTIZE)
    return compiled(key.removeprefix(_OVERRIDE)), _scheme({**config, **changes})


def _flat(names: list[Any]) -> Iterator[str]:
    """Names of a list, or of a list of lists."""
    for each in names:
        if isinstance(each, list):
            yield from _flat(each)
        elif isinstance(each, str):
            yield each
        else:
            raise CheckpointError(
                f"quantization_config: `modules_in_block_to_quantize` holds {each!a:.80}, which is no name", REQUANTIZE
            )
