"""The law of the Marlin kernel, which vLLM, SGLang and TGI share. N out_features and K in_features of one rank."""

from __future__ import annotations

from quantkit.engines.base import Fact
from quantkit.scheme import Scheme

GROUPS = (-1, 32, 64, 128)
MIN_N, MIN_K = 64, 128
TILES = ((MIN_N, MIN_K), (128, 64))  # multiples that N and K must be; either pair will do

CONSTANTS = Fact(
    f"Marlin computes tiles with N % {MIN_N} = 0 and K % {MIN_K} = 0, or N % 128 = 0 and K % 64 = 0, and groups of"
    " 32, 64 or 128 inputs or whole rows",
    "vLLM 0.32.0 model_executor/layers/quantization/utils/marlin_utils.py: GPTQ_MARLIN_MIN_THREAD_N,"
    " GPTQ_MARLIN_MIN_THREAD_K, MARLIN_SUPPORTED_GROUP_SIZES, marlin_padded_nk",
)


def takes(scheme: Scheme, *, eight_bit_zeros: bool = False) -> bool:
    """Whether there is a Marlin kernel for these codes: 4 bits, or symmetric 8 bits, in groups of its sizes."""
    codes = scheme.bits == 4 or scheme.symmetric or eight_bit_zeros
    return codes and scheme.group_size in GROUPS


def tile_problem(out_features: int, in_features: int, *, strict: bool = False) -> str:
    """Say why a matrix is not made of whole tiles; "" where it is.

    Args:
        strict: only the first pair of multiples counts.
    """
    pairs = TILES[:1] if strict else TILES
    if any(out_features % n == 0 and in_features % k == 0 for n, k in pairs):
        return ""
    found = [f"N % {MIN_N} = {out_features % MIN_N}"] if out_features % MIN_N else []
    found += [f"K % {MIN_K} = {in_features % MIN_K}"] if in_features % MIN_K else []
    return f"N {out_features:,} by K {in_features:,} is no multiple of Marlin's tiles ({', '.join(found)})"


def padded(out_features: int, in_features: int, group_size: int) -> tuple[int, int]:
    """N and K after padding with zeros to the smaller pair of tile multiples; K stays a multiple of the group.

    The groups are 32, 64 or 128, so a multiple of 64 or 128 inputs is one of the group, or the group itself is larger.
    """
    group = max(group_size, 1)
    sizes = [(_up(out_features, n), _up(in_features, max(k, group))) for n, k in TILES]
    return min(sizes, key=lambda size: (size[0] * size[1], sum(size)))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
