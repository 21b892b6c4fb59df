"""SGLang: compressed-tensors, GPTQ and AWQ; Marlin without padding."""

from __future__ import annotations

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
    Unit,
    group_problem,
    packing_problem,
    refusal,
)
from quantkit.scheme import Scheme

_READ = "SGLang main python/sglang/srt/layers/quantization/"

NO_PADDING = Fact(
    "Marlin has no padding, and nothing stands in for it in GPTQ and compressed-tensors checkpoints",
    f"{_READ}gptq/schemes/gptq_marlin.py, compressed_tensors/schemes/compressed_tensors_wNa16.py, marlin_utils.py",
)
MARLIN_ONLY = Fact(
    "compressed-tensors checkpoints run on Marlin only",
    f"{_READ}compressed_tensors/schemes/compressed_tensors_wNa16.py",
)
EXLLAMA = Fact(
    "GPTQ checkpoints that Marlin does not take run on Exllama, in float16", f"{_READ}gptq/gptq.py GPTQConfig"
)
AWQ_FALLBACK = Fact(
    "AWQ matrices that Marlin does not take run on slower AWQ kernels, in float16", f"{_READ}awq/awq.py"
)
EXPERTS = Fact(
    "Marlin takes experts when the hidden size is a multiple of 128 and a rank's expert width one of 64 and the group",
    f"{_READ}marlin_utils.py check_moe_marlin_supports_layer",
)
GPTQ_EXPERTS = Fact("Experts of GPTQ checkpoints run on Marlin only", f"{_READ}gptq/gptq.py GPTQConfig")
WHOLE = Fact(
    "A rank must hold whole groups and whole words",
    f"{_READ}gptq/schemes/gptq_linear.py, awq/schemes/awq_linear.py",
)
AWQ_BITS = Fact("AWQ checkpoints are taken with 4 bits", f"{_READ}awq/awq.py AWQConfig")


def _answer(unit: Unit, scheme: Scheme, fmt: str, model: Model) -> Answer:
    if problem := packing_problem(unit, scheme, fmt) or group_problem(unit, scheme):
        return refusal(problem, WHOLE)
    if fmt == AWQ and scheme.bits != 4:
        return refusal(f"AWQ checkpoints of {scheme.bits} bits are refused", AWQ_BITS)
    takes = marlin.takes(scheme) and (scheme.symmetric or fmt != GPTQ) and GPTQ_V2 not in model.quirks
    if unit.experts:
        return _experts(unit, scheme, fmt, takes)
    # the AWQ loader asks for the first pair of tile multiples, the others for nothing: the kernel takes either
    tile = marlin.tile_problem(unit.out_features, unit.in_features, strict=fmt == AWQ)
    if takes and not tile:
        return Answer("Marlin", fact=marlin.CONSTANTS)
    if fmt == AWQ:
        return _in_float16("AWQ", tile or f"Marlin has no kernel for {scheme}", AWQ_FALLBACK, model)
    if takes:
        return refusal(tile, NO_PADDING)
    if fmt == COMPRESSED_TENSORS:
        return refusal(f"Marlin has no kernel for {scheme}", MARLIN_ONLY)
    return _in_float16("Exllama", f"Marlin has no kernel for {scheme} in GPTQ checkpoints", EXLLAMA, model)


def _in_float16(kernel: str, why: str, fact: Fact, model: Model) -> Answer:
    serve = "" if model.dtype == "float16" else "; start SGLang with `--dtype float16`"
    return Answer(kernel, f"{why}{serve}", fact)


def _experts(unit: Unit, scheme: Scheme, fmt: str, takes: bool) -> Answer:
    down = unit.name.endswith(".w2")
    hidden, width = (unit.out_features, unit.in_features) if down else (unit.in_features, min(unit.parts))
    fits = hidden % 128 == 0 and width % max(64, scheme.group_size) == 0
    if takes and fits:
        return Answer("Marlin", fact=EXPERTS)
    why = (
        f"hidden size {hidden:,} and expert width {width:,} do not fit Marlin"
        if takes
        else f"Marlin has no kernel for {scheme}"
    )
    if fmt == AWQ:
        return Answer("MoeWNA16", why, EXPERTS)
    return refusal(why, GPTQ_EXPERTS if fmt == GPTQ else EXPERTS)


SGLANG = Engine(
    name="sglang",
    title="SGLang on an NVIDIA GPU",
    formats=(COMPRESSED_TENSORS, AWQ, GPTQ),
    refuses={
        MODELOPT: Fact("SGLang reads FP8 and FP4 checkpoints of ModelOpt, not W4A16_AWQ", f"{_READ}modelopt_quant.py")
    },
    answer=_answer,
    cache={
        COMPRESSED_TENSORS: Fact(
            "SGLang reads `k_scale` and `v_scale` when it is started with `--kv-cache-dtype fp8_e4m3`",
            f"{_READ}kv_cache.py",
        )
    },
    no_cache=Fact(
        "For GPTQ and AWQ checkpoints, pass the scales as `--quantization-param-path kv_cache_scales.tp1.json` (of the"
        " number of ranks), with `--kv-cache-dtype fp8_e4m3`",
        "SGLang main python/sglang/srt/model_executor/model_runner.py",
    ),
    notes={
        COMPRESSED_TENSORS: (
            Fact(
                "Only newer releases of SGLang take free zero points (asymmetric) in compressed-tensors checkpoints",
                f"{_READ}compressed_tensors/schemes/compressed_tensors_wNa16.py",
            ),
        )
    },
    fuses=Fact(
        "q, k, v and gate, up and the experts of a layer are held as one matrix, which has one scheme",
        "SGLang main python/sglang/srt/layers/linear.py QKVParallelLinear, MergedColumnParallelLinear",
    ),
    splits=Fact(
        "Heads, outputs and inputs are divided evenly between ranks",
        "SGLang main python/sglang/srt/distributed/utils.py divide",
    ),
)
