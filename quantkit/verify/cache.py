"""Checks of the scales of an FP8 KV cache: in the weights, in the config, in the files for SGLang."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from quantkit.blocks.kvcache import find_attentions
from quantkit.checkpoint.locate import read_json_object
from quantkit.errors import CheckpointError, UnsupportedScheme
from quantkit.formats.kv_cache import cache_scale_owner
from quantkit.verify.structure import FLOATS
from quantkit.verify.subject import Subject
from quantkit.verify.verdict import Check

MODELOPT_FILE = "hf_quant_config.json"
_FILE = re.compile(r"kv_cache_scales\.tp(\d+)\.json")
_AGAIN = "quantize again with `--kv-cache fp8`"
_RELATIVE = 1e-6  # a float32 in the weights, its decimal form in the file


def stored_scales(subject: Subject) -> dict[str, tuple[str, str]]:
    """{tensor: (attention module, "k" or "v")} of every scale of a cache in the weights."""
    owners = {name: cache_scale_owner(name) for name in subject.source.checkpoint.tensors}
    return {name: owner for name, owner in owners.items() if owner is not None}


def look_at_cache(subject: Subject, check: Check) -> None:
    """Check that declared scales are there, and those that are there declared, single, finite and positive."""
    stored, declared = stored_scales(subject), _declared(subject, check)
    path = subject.source.checkpoint.path
    files = sorted(file for file in path.glob("kv_cache_scales.tp*.json") if _FILE.fullmatch(file.name))
    if not stored and not declared and not files:
        check.note = check.note or "no scales of a KV cache, and none declared"
        return
    if stored and not declared:
        check.fail(
            next(iter(stored)),
            f"is one of {len(stored)} scales of a KV cache that the config does not declare: engines ignore them",
            "quantize again with `--kv-cache fp8` in a format that holds them",
        )
    try:
        attentions = find_attentions(subject.skeleton)
    except UnsupportedScheme as error:
        check.fail("config.json", f"declares scales of a KV cache, but {error.message}", error.hint)
        return
    scales = _look_at_tensors(subject, stored, attentions if declared else {}, check)
    for file in files:
        _look_at_file(subject, file.name, scales, attentions, check)


def _declared(subject: Subject, check: Check) -> bool:
    """Whether the config turns an FP8 cache on, as the engines of this format read it."""
    config = subject.source.checkpoint.config.get("quantization_config")
    scheme = config.get("kv_cache_scheme") if isinstance(config, dict) else None
    declared = isinstance(scheme, dict) and scheme.get("type") == "float" and scheme.get("num_bits") == 8
    if scheme and not declared:
        check.fail("config.json", f"has a `kv_cache_scheme` that is not FP8: {scheme!a:.80}", _AGAIN)
    path = subject.source.checkpoint.path / MODELOPT_FILE
    if path.exists():
        try:
            inner = read_json_object(path).get("quantization")
        except CheckpointError as error:
            check.fail(MODELOPT_FILE, error.message, error.hint)
            return declared
        nested = isinstance(inner, dict) and inner.get("kv_cache_quant_algo") == "FP8"
        if nested != declared:
            check.fail(
                MODELOPT_FILE, "and config.json disagree whether there is an FP8 KV cache", "quantize or convert again"
            )
        return declared or nested
    return declared


def _look_at_tensors(
    subject: Subject, stored: Mapping[str, tuple[str, str]], attentions: Mapping[str, int], check: Check
) -> dict[str, dict[str, float]]:
    """Check the scales in the weights; returns those that are right, {attention: {"k" or "v": scale}}."""
    source, fmt = subject.source, subject.source.format
    wanted = {name: each for each in attentions for name in (fmt.cache_specs(each) if fmt else ())}
    for name in sorted(wanted.keys() - stored.keys()):
        check.fail(name, "is missing: the attention would use a scale of 1", _AGAIN)
    found: dict[str, dict[str, float]] = {}
    for name, (attention, which) in stored.items():
        check.looked += 1
        if attentions and name not in wanted:
            check.fail(
                name, "is the scale of no attention of the model, or has a name this format does not use", _AGAIN
            )
            continue
        info = source.checkpoint.tensors[name]
        if info.dtype not in FLOATS or math.prod(info.shape) != 1:
            check.fail(name, f"is {info.dtype} {list(info.shape)}, not one number", _AGAIN)
            continue
        value = float(source.checkpoint.read([name])[name])
        if not (math.isfinite(value) and value > 0):
            check.fail(name, f"is {value}, not finite and positive", _AGAIN)
            continue
        found.setdefault(attention, {})[which] = value
    return found


def _look_at_file(
    subject: Subject,
    file: str,
    scales: Mapping[str, Mapping[str, float]],
    attentions: Mapping[str, int],
    check: Check,
) -> None:
    """Check a file for SGLang: as many ranks as its name says, every layer in each, the larger scale of K and V."""
    try:
        content = read_json_object(subject.source.checkpoint.path / file)
    except CheckpointError as error:
        check.fail(file, error.message, error.hint)
        return
    ranks = int(file.split(".tp")[1].split(".")[0])
    cache = content.get("kv_cache")
    factors = cache.get("scaling_factor") if isinstance(cache, dict) else None
    model_type = subject.source.checkpoint.config.get("model_type")
    if content.get("model_type") != model_type:
        check.fail(
            file, f"is for model type `{content.get('model_type')}`, and config.json says `{model_type}`", _AGAIN
        )
    if not isinstance(factors, dict) or not isinstance(cache, dict) or cache.get("dtype") != "float8_e4m3fn":
        check.fail(file, "has no `scaling_factor` for `float8_e4m3fn`", _AGAIN)
        return
    if set(factors) != {str(rank) for rank in range(ranks)}:
        check.fail(file, f"has ranks {', '.join(sorted(factors)) or 'none'}, and {ranks} from 0 on are needed", _AGAIN)
    known: dict[str, float] = {}
    for attention, layer in attentions.items():
        if set(pair := scales.get(attention, {})) == {"k", "v"}:
            known[str(layer)] = max(known.get(str(layer), 0.0), *pair.values())
    layers = {str(layer) for layer in attentions.values()}
    for rank, factor in factors.items():
        if problem := _wrong_factors(factor, layers, known):
            check.fail(file, f"rank {rank}: {problem}", _AGAIN)
        check.looked += len(layers)


def _wrong_factors(factors: Any, layers: set[str], known: Mapping[str, float]) -> str:
    """What is wrong with the factors of one rank, or ""."""
    if not isinstance(factors, dict) or set(factors) != layers:
        count = len(factors) if isinstance(factors, dict) else "no"
        return f"has {count} layers, and the model's {len(layers)} are needed"
    for layer, value in factors.items():
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            return f"layer {layer} has {value!a:.40}, not finite and positive"
        if layer in known and not math.isclose(value, known[layer], rel_tol=_RELATIVE):
            return f"layer {layer} has {value:.6g}, and the larger of its scales in the weights is {known[layer]:.6g}"
    return ""
