"""The dtype names of a safetensors header and the bytes of an element. Whole-byte dtypes only; imports no torch."""

from __future__ import annotations

ITEM_BYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}


def itemsize(dtype: str) -> int:
    """Bytes of one element of a dtype that the table holds."""
    return ITEM_BYTES[dtype]


def is_floating(dtype: str) -> bool:
    """Whether a dtype of the table holds real floating-point numbers."""
    return dtype.startswith(("F", "BF"))
