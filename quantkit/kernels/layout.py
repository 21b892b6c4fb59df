"""The one layout of packed 4-bit weights that every kernel here reads: pack, unpack, dequantize.

N out_features, K in_features, G groups, g group size; Np and Kp are N and K padded to whole tiles. A tile is 16 input
features by 64 output features in 512 bytes: what one warp loads as the B operands of eight mma.m16n8k16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantkit.errors import UnsupportedScheme
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import PER_CHANNEL

TILE_N, TILE_K = 64, 16
MIDPOINT = 8  # the zero point of symmetric codes, which is not stored
# layout: lane 4r+t of a tile holds outputs 8j+r (j = 0..7) at inputs 2t, 2t+1, 2t+8 and 2t+9; its word w has j = 2w in
# nibbles 0, 4 (inputs 2t, 2t+1) and 1, 5 (inputs 2t+8, 2t+9), and j = 2w+1 in nibbles 2, 6 and 3, 7
# layout: scales and zero points of a block of 64 outputs are stored in the order index 8r+j <-> output 8j+r


@dataclass(frozen=True)
class PackedWeight:
    """A 4-bit linear in the layout of the kernels.

    Attributes:
        qweight: int32 [Kp/16, Np/64, 32, 4].
        scales: float16 or bfloat16 [G, Np], permuted within blocks of 64.
        zeros: int32 [G, Np/8], nibble j of word (block, r) is the zero point of output 64*block+8j+r; None where all
            are 8.
        perm: int32 [K]; column i of the packed weight multiplies input perm[i]. None for the identity.
        out_features: N.
        in_features: K.
        group_size: columns of a scale; Kp where there is one per output.
    """

    qweight: Tensor
    scales: Tensor
    zeros: Tensor | None
    perm: Tensor | None
    out_features: int
    in_features: int
    group_size: int


def padded(n: int, k: int, group_size: int) -> tuple[int, int]:
    """Np and Kp; a group size of -1 is one scale per output."""
    step = 64 if group_size == PER_CHANNEL else max(64, group_size)
    return -(-n // TILE_N) * TILE_N, -(-k // step) * step


def refusal(q: QuantizedWeight) -> str:
    """Why a weight cannot be packed for the kernels, or "" where it can."""
    scheme, columns = q.scheme, q.codes.shape[1]
    if scheme.bits != 4:
        return f"{scheme.bits}-bit codes"
    # a kernel finds the group of a column by a shift
    if scheme.group_size != PER_CHANNEL and (scheme.group_size < TILE_K or scheme.group_size & (scheme.group_size - 1)):
        return f"groups of {scheme.group_size}, which is no power of two from 16 up"
    if not scheme.fits(columns):
        return f"groups of {scheme.group_size} in rows of {columns}"
    if q.g_idx is not None and not _even(q.g_idx, scheme.group(columns), q.scale.shape[1]):
        return "groups of unequal size"
    if bool((q.zero_point > 15).any()):
        return "a zero point above 15"
    return ""


def pack(q: QuantizedWeight, dtype: torch.dtype, perm: Tensor | None = None) -> PackedWeight:
    """Lay a weight out for the kernels.

    Args:
        dtype: float16 or bfloat16, of the scales and of the activations on a GPU.
        perm: int [K], order of the input features in which groups are consecutive; None takes it from `q.g_idx`.

    Raises:
        UnsupportedScheme: see `refusal`.
    """
    if reason := refusal(q):
        raise UnsupportedScheme(f"the 4-bit kernels do not read {reason}", "dequantize this linear")
    n, k = q.codes.shape
    if perm is None and q.g_idx is not None:
        perm = torch.argsort(q.g_idx, stable=True)
    if perm is not None and torch.equal(perm.long(), torch.arange(k, device=perm.device)):
        perm = None
    codes = q.codes if perm is None else q.codes[:, perm.long()]
    rows, columns = padded(n, k, q.scheme.group_size)
    group = columns if q.scheme.group_size == PER_CHANNEL else q.scheme.group_size
    groups = columns // group
    zero = torch.full((rows, groups), MIDPOINT, dtype=torch.uint8, device=codes.device)
    zero[:n, : q.zero_point.shape[1]] = q.zero_point
    scale = torch.zeros(rows, groups, dtype=dtype, device=codes.device)
    scale[:n, : q.scale.shape[1]] = q.scale.to(dtype)
    whole = zero.repeat_interleave(group, 1)  # [Np, Kp]: padding holds the code of zero
    whole[:n, :k] = codes
    symmetric = bool((zero == MIDPOINT).all())
    return PackedWeight(
        _pack_codes(whole),
        _to_blocks(scale),
        None if symmetric else _pack_zeros(zero),
        None if perm is None else perm.to(torch.int32),
        n,
        k,
        group,
    )


def unpack(p: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [N, K] in packed column order, zero points uint8 [N, G] and scales [N, G]."""
    n, k = p.out_features, p.in_features
    groups = math.ceil(k / p.group_size)
    scale = _from_blocks(p.scales)[:n, :groups]
    if p.zeros is None:
        zero = torch.full(scale.shape, MIDPOINT, dtype=torch.uint8, device=scale.device)
    else:
        zero = _from_blocks(_fields(p.zeros).flatten(1))[:n, :groups]
    return _unpack_codes(p.qweight)[:n, :k].contiguous(), zero.contiguous(), scale.contiguous()


def dequantize(p: PackedWeight) -> Tensor:
    """The weight [N, K] in the dtype of the scales and the model's column order.

    The difference of code and zero point is exact; its product with the scale is rounded once.
    """
    codes, zero, scale = unpack(p)
    factor = scale.float().repeat_interleave(p.group_size, 1)[:, : p.in_features]
    offset = zero.repeat_interleave(p.group_size, 1)[:, : p.in_features]
    weight = (codes.float() - offset.float()).mul_(factor).to(scale.dtype)
    if p.perm is None:
        return weight
    return torch.empty_like(weight).index_copy_(1, p.perm.long(), weight)


def _even(g_idx: Tensor, group: int, groups: int) -> bool:
    counts = torch.bincount(g_idx.long(), minlength=groups)
    return counts.numel() == groups and bool((counts == group).all())


def _pack_codes(codes: Tensor) -> Tensor:
    """int32 [Kp/16, Np/64, 32, 4] of codes uint8 [Np, Kp]."""
    rows, columns = codes.shape
    # n = 64 block + 16 w + 8 parity + r; k = 16 tile + 8 half + 2 t + odd
    parts = codes.view(rows // 64, 4, 2, 8, columns // 16, 2, 4, 2)
    parts = parts.permute(4, 0, 3, 6, 1, 7, 2, 5)  # [tile, block, r, t, w, odd, parity, half]
    return _words(parts.flatten(5)).view(columns // 16, rows // 64, 32, 4)


def _unpack_codes(qweight: Tensor) -> Tensor:
    """Codes uint8 [Np, Kp] of int32 [Kp/16, Np/64, 32, 4]."""
    tiles, blocks = qweight.shape[:2]
    parts = _fields(qweight).view(tiles, blocks, 8, 4, 4, 2, 2, 2)
    return parts.permute(1, 4, 6, 2, 0, 7, 3, 5).reshape(blocks * 64, tiles * 16)


def _pack_zeros(zero: Tensor) -> Tensor:
    return _words(_to_blocks(zero).unflatten(1, (-1, 8)))


def _to_blocks(values: Tensor) -> Tensor:
    """[G, Np] in the order of the kernels, of [Np, G]."""
    rows, groups = values.shape
    return values.view(rows // 64, 8, 8, groups).permute(3, 0, 2, 1).reshape(groups, rows).contiguous()


def _from_blocks(values: Tensor) -> Tensor:
    groups, rows = values.shape
    return values.view(groups, rows // 64, 8, 8).permute(1, 3, 2, 0).reshape(rows, groups)


def _words(fields: Tensor) -> Tensor:
    """int32 [...] of eight nibbles [..., 8], the first in the lowest bits."""
    word = torch.zeros(fields.shape[:-1], dtype=torch.int32, device=fields.device)
    for i in range(8):
        word |= fields[..., i].to(torch.int32) << (4 * i)
    return word


def _fields(words: Tensor) -> Tensor:
    """Eight nibbles uint8 [..., 8] of int32 [...]."""
    return torch.stack([(words >> (4 * i)) & 15 for i in range(8)], -1).to(torch.uint8)
