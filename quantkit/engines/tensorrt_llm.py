"""TensorRT-LLM's PyTorch backend: 4-bit integers only as ModelOpt writes them."""

from __future__ import annotations

from quantkit.engines.base import (
    AWQ,
    COMPRESSED_TENSORS,
    GPTQ,
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

_READ = "TensorRT-LLM main "
GROUPS = (64, 128)
MIN_N, MIN_K = 16, 64

LAYOUT = Fact(
    f"The 4-bit kernel takes symmetric codes in groups of 64 or 128, K % {MIN_K} = 0 and N % {MIN_N} = 0",
    f"{_READ}cpp/tensorrt_llm/kernels/cutlass_kernels/fpA_intB_gemm, tensorrt_llm/quantization/functional.py"
    " preprocess_weights_for_mixed_gemm",
)
METHOD = Fact("in_features must be a multiple of the group size", f"{_READ}tensorrt_llm/_torch/modules/linear.py")


def _answer(unit: Unit, scheme: Scheme, fmt: str, model: Model) -> Answer:
    if scheme.bits != 4 or not scheme.symmetric or scheme.group_size not in GROUPS:
        return refusal(f"no kernel takes {scheme}", LAYOUT)
    if problem := packing_problem(unit, scheme, fmt) or group_problem(unit, scheme):
        return refusal(problem, METHOD)
    odd = [f"N {unit.out_features:,} % {MIN_N} = {unit.out_features % MIN_N}"] if unit.out_features % MIN_N else []
    odd += [f"K {unit.in_features:,} % {MIN_K} = {unit.in_features % MIN_K}"] if unit.in_features % MIN_K else []
    if odd:
        return refusal(f"the kernel does not take the shape: {', '.join(odd)}", LAYOUT)
    return Answer("W4A16 CUTLASS", fact=LAYOUT)


TENSORRT_LLM = Engine(
    name="tensorrt-llm",
    title="TensorRT-LLM, PyTorch backend",
    formats=(MODELOPT,),
    refuses={
        COMPRESSED_TENSORS: Fact(
            "TensorRT-LLM reads FP8 and FP4 compressed-tensors checkpoints, and no integers",
            f"{_READ}tensorrt_llm/models/quant_config_utils.py",
        ),
        GPTQ: Fact(
            "TensorRT-LLM's PyTorch backend reads no GPTQ checkpoints", f"{_READ}tensorrt_llm/_torch/model_config.py"
        ),
        AWQ: Fact(
            "TensorRT-LLM's PyTorch backend reads AWQ only as ModelOpt writes it (W4A16_AWQ)",
            f"{_READ}tensorrt_llm/_torch/model_config.py",
        ),
    },
    answer=_answer,
    cache={
        MODELOPT: Fact(
            "TensorRT-LLM reads `k_proj.k_scale` and `v_proj.v_scale` where the config names an FP8 cache",
            f"{_READ}tensorrt_llm/_torch/model_config.py",
        )
    },
    no_cache=Fact("TensorRT-LLM reads no such checkpoint", f"{_READ}tensorrt_llm/_torch/model_config.py"),
    fuses=Fact(
        "q, k, v and gate, up and the experts of a layer are held as one matrix, which has one scheme",
        f"{_READ}tensorrt_llm/_torch/modules/linear.py WeightMode",
    ),
    splits=Fact(
        "Heads, outputs and inputs are divided evenly between ranks",
        f"{_READ}tensorrt_llm/_torch/modules/linear.py load_weight_shard",
    ),
)
