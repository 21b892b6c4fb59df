"""Text Generation Inference, which is in maintenance: GPTQ, AWQ and symmetric compressed-tensors."""

from __future__ import annotations

from collections.abc import Iterable

from quantkit.engines import marlin
from quantkit.engines.base import (
    AWQ,
    COMPRESSED_TENSORS,
    GPTQ,
    GPTQ_V2,
    MODELOPT,
    Answer,
    Engine,
    Fact,
    Model,
    Schemes,
    Unit,
    Whole,
    group_problem,
    packing_problem,
    refusal,
)
from quantkit.engines.units import REPLICATED
from quantkit.scheme import Scheme

_READ = "text-generation-inference main server/text_generation_server/layers/"

TILES = Fact(
    "Marlin is chosen by bits, group size and symmetry; a matrix that is no multiple of its tiles is then an error",
    f"{_READ}marlin/gptq.py can_use_gptq_marlin, _check_valid_shape",
)
ASYMMETRIC = Fact(
    "Zero points of compressed-tensors checkpoints are looked up under a wrong name (`qzeros`)",
    f"{_READ}compressed_tensors/wna16_int.py",
)
GROUPS = Fact("compressed-tensors checkpoints run on Marlin only", f"{_READ}compressed_tensors/wna16_int.py")
FALLBACK = Fact(
    "GPTQ checkpoints that Marlin does not take run on Exllama with 4 bits, else on Triton; AWQ ones on AWQ kernels",
    f"{_READ}gptq/__init__.py",
)
WHOLE_GROUPS = Fact("A rank must hold whole groups and whole words", f"{_READ}marlin/gptq.py, utils/weights.py")
NO_SKIP = Fact(
    "The loader of GPTQ and AWQ checkpoints reads no list of modules that are kept in 16 bit",
    f"{_READ}marlin/gptq.py GPTQMarlinWeightsLoader",
)
VERSION_2 = Fact(
    "`checkpoint_format` is not read, so that zero points of version 2 are taken for those of version 1, one too many",
    f"{_READ}gptq/__init__.py",
)
ONE_SCHEME = Fact(
    "GPTQ and AWQ checkpoints have one scheme for all linears: `dynamic` is not read", f"{_READ}marlin/gptq.py"
)


def _answer(unit: Unit, scheme: Scheme, fmt: str, model: Model) -> Answer:
    if fmt == COMPRESSED_TENSORS and not scheme.symmetric:
        return refusal("asymmetric compressed-tensors checkpoints do not load", ASYMMETRIC)
    if GPTQ_V2 in model.quirks:
        return refusal("zero points of GPTQ version 2 are read wrongly", VERSION_2)
    if problem := packing_problem(unit, scheme, fmt) or group_problem(unit, scheme):
        return refusal(problem, WHOLE_GROUPS)
    if marlin.takes(scheme, eight_bit_zeros=True) and (scheme.symmetric or fmt == AWQ):
        tile = marlin.tile_problem(unit.out_features, unit.in_features)
        return refusal(tile, TILES) if tile else Answer("Marlin", fact=TILES)
    why = f"Marlin has no kernel for {scheme} in {fmt} checkpoints"
    if fmt == COMPRESSED_TENSORS:
        return refusal(why, GROUPS)
    if fmt == AWQ:
        return Answer("AWQ", why, FALLBACK)
    return Answer("Exllama" if scheme.bits == 4 else "Triton", why, FALLBACK)


def _whole(schemes: Schemes, fmt: str) -> Iterable[Whole]:
    if fmt == COMPRESSED_TENSORS:
        return
    kept = tuple(
        name for name, scheme in schemes.items() if scheme is None and name.rpartition(".")[2] not in REPLICATED
    )
    packed = {scheme for scheme in schemes.values() if scheme is not None}
    if kept and packed:
        reason = f"linears that stay in 16 bit are looked for as packed ones in {fmt} checkpoints"
        yield Whole(kept, refusal(reason, NO_SKIP, "quantize these linears too"))
    if len(packed) > 1:
        names = tuple(name for name, scheme in schemes.items() if scheme is not None)
        reason = f"{len(packed)} schemes beside each other in a {fmt} checkpoint are read as one"
        yield Whole(names, refusal(reason, ONE_SCHEME, "leave out `--override`"))


_SCALES = Fact(
    "TGI reads `k_scale` and `v_scale` of any checkpoint when it is started with `--kv-cache-dtype fp8_e4m3fn`",
    f"{_READ}attention/kv_cache.py",
)

TGI = Engine(
    name="tgi",
    title="Text Generation Inference (in maintenance) on an NVIDIA GPU",
    formats=(COMPRESSED_TENSORS, GPTQ, AWQ),
    refuses={MODELOPT: Fact("TGI does not read ModelOpt checkpoints", f"{_READ}../utils/quantization.py")},
    answer=_answer,
    cache={COMPRESSED_TENSORS: _SCALES},
    no_cache=Fact(
        "The cache's scales have no place in GPTQ and AWQ checkpoints; TGI then uses 1.0",
        f"{_READ}attention/kv_cache.py",
    ),
    whole=_whole,
    fuses=Fact(
        "q, k, v and gate, up are loaded as one matrix, which has one scheme",
        f"{_READ}../utils/weights.py get_multi_weights_col",
    ),
    splits=Fact(
        "Heads, outputs and inputs are divided evenly between ranks",
        f"{_READ}../utils/weights.py get_sharded",
    ),
)
