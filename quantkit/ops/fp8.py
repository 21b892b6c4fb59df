"""Numbers as an FP8 cache holds them."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max


def fake_e4m3(x: Tensor, scale: float) -> Tensor:
    """Store x as e4m3(x / scale), to nearest and saturating at ±448, and read it back times scale, in the dtype of x.

    The arithmetic is float32; nan stays nan.

    Args:
        scale: positive and finite.
    """
    # the cast alone makes nan of what is beyond the range
    stored = (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return (stored.float() * scale).to(x.dtype)
