"""Hugging Face transformers with the packages it needs: any shape the format allows, in one process."""

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
    refusal,
)
from quantkit.scheme import Scheme

_RUN = "run with transformers 5.24.0"
_READ = "transformers 5.19.0 "

DECOMPRESSED = Fact(
    "compressed-tensors weights are unpacked to 16 bit at the first forward pass",
    f"{_RUN} and compressed-tensors 0.20.0",
)
ZERO_POINTS = Fact(
    "With compressed-tensors 0.18 to 0.20, asymmetric weights load only with"
    " `quantization_config=CompressedTensorsConfig(dequantize=True)`; 0.17 needs nothing",
    f"{_RUN} and compressed-tensors 0.17.0, 0.18.0, 0.19.0, 0.20.0",
)
GPTQMODEL = Fact(
    "GPTQ checkpoints need the packages gptqmodel and optimum", f"{_RUN}, gptqmodel 7.7.0 and optimum 2.3.0"
)
AWQ_NEEDS = Fact("AWQ checkpoints need the package gptqmodel", f"{_RUN} and gptqmodel 7.7.0")
AWQ_BITS = Fact("AWQ checkpoints are taken with 4 bits", "AutoAWQ awq/modules/linear/gemm.py")


def _answer(unit: Unit, scheme: Scheme, fmt: str, model: Model) -> Answer:
    if fmt == COMPRESSED_TENSORS:
        if scheme.symmetric:
            return Answer("decompressed", fact=DECOMPRESSED)
        return Answer("decompressed", "asymmetric weights need `CompressedTensorsConfig(dequantize=True)`", ZERO_POINTS)
    if fmt == AWQ and scheme.bits != 4:
        return refusal(f"AWQ checkpoints of {scheme.bits} bits are refused", AWQ_BITS)
    return Answer("gptqmodel", fact=AWQ_NEEDS if fmt == AWQ else GPTQMODEL)


TRANSFORMERS = Engine(
    name="transformers",
    title="transformers 5",
    formats=(COMPRESSED_TENSORS, GPTQ, AWQ),
    refuses={
        MODELOPT: Fact("transformers has no quantizer for ModelOpt checkpoints", f"{_READ}utils/quantization_config.py")
    },
    answer=_answer,
    cache={},
    no_cache=Fact("transformers reports the cache's scales as unexpected tensors and leaves them out", f"{_RUN}"),
    notes={COMPRESSED_TENSORS: (DECOMPRESSED,), GPTQ: (GPTQMODEL,), AWQ: (AWQ_NEEDS,)},
)
