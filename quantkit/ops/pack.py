"""Integer codes packed into 32-bit words and back. Knows bits and order; nothing of formats, names or scales.

Notation: N rows, K codes in a row, W 32-bit words in a row, b bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32


def words(count: int, bits: int) -> int:
    """Count the 32-bit words that `count` codes of `bits` bits fill, the last one possibly in part."""
    return -(-count * bits // WORD_BITS)


def pack_int32(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along the last dimension, the first code in the lowest bits.

    Args:
        codes: uint8 [..., K], each below 2^bits. Not modified.
        bits: 4 or 8.

    Returns:
        int32 [..., ceil(K * bits / 32)]; bits beyond the last code are 0. Shares no memory with `codes`.
    """
    _check(codes, torch.uint8, bits)
    padding = words(codes.shape[-1], bits) * (WORD_BITS // bits) - codes.shape[-1]
    if padding:
        codes = torch.nn.functional.pad(codes, (0, padding))
    # layout: a word's bytes are written low byte first, so bytes in code order are the little-endian word
    if bits == 8:
        return _recast(codes.clone(memory_format=torch.contiguous_format), torch.int32)
    pairs = codes[..., 1::2] << 4  # the only temporary: K / 2 bytes a row, and it becomes the result
    pairs |= codes[..., 0::2]
    return _recast(pairs, torch.int32)


def unpack_int32(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo `pack_int32`.

    Args:
        packed: int32 [..., W]. Not modified.
        bits: 4 or 8.
        count: K, the codes in a row; at most W * 32 / bits.

    Returns:
        uint8 [..., K].
    """
    _check(packed, torch.int32, bits)
    if words(count, bits) != packed.shape[-1]:
        raise ValueError(f"{count} codes of {bits} bits do not fill {packed.shape[-1]} words")
    octets = _recast(packed, torch.uint8)  # [..., 4 W]
    if bits == 8:
        return octets[..., :count].clone(memory_format=torch.contiguous_format)
    codes = torch.empty(*octets.shape[:-1], octets.shape[-1] * 2, dtype=torch.uint8, device=packed.device)
    torch.bitwise_and(octets, 0x0F, out=codes[..., 0::2])
    torch.bitwise_right_shift(octets, 4, out=codes[..., 1::2])
    return codes[..., :count].contiguous()


def _recast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret the bytes of each row."""
    # flattened first: a dimension of size 1 may have a stride that `view` cannot divide
    *lead, last = tensor.shape
    return tensor.contiguous().view(-1).view(dtype).view(*lead, last * tensor.itemsize // dtype.itemsize)


def _check(tensor: Tensor, dtype: torch.dtype, bits: int) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"expected {dtype}, got {tensor.dtype}")
    if bits not in (4, 8):
        raise ValueError(f"codes of {bits} bits cannot be packed here")
