"""Quantized weights with random contents."""

from __future__ import annotations

import torch

from quantkit.qweight import QuantizedWeight
from quantkit.scheme import Scheme

DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}


def random_weight(
    scheme: Scheme,
    rows: int,
    columns: int,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    least_zero: int = 0,
) -> QuantizedWeight:
    """A weight [rows, columns] with every code and zero point possible, and scales that float16 and bfloat16 both hold.

    Args:
        least_zero: of the zero points of an asymmetric weight.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = columns // scheme.group(columns)

    def codes(*shape: int, least: int = 0) -> torch.Tensor:
        return torch.randint(least, scheme.qmax + 1, shape, dtype=torch.uint8, generator=generator)

    zero_point = torch.full((rows, groups), scheme.midpoint, dtype=torch.uint8)
    return QuantizedWeight(
        codes=codes(rows, columns),
        scale=(torch.rand(rows, groups, generator=generator) + 0.1).bfloat16().to(dtype),
        zero_point=zero_point if scheme.symmetric else codes(rows, groups, least=least_zero),
        scheme=scheme,
    )
