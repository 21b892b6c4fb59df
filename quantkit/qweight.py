"""The value every stage shares: a quantized weight, unpacked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Codes and parameters of one linear; w = scale * (code - zero_point).

    N out_features, K in_features, G groups.

    Attributes:
        codes: uint8 [N, K], 0 .. 2^bits - 1.
        scale: [N, G] in the dtype that will be stored (float16 or bfloat16).
        zero_point: uint8 [N, G] in code units.
        scheme: bits, group size and symmetry.
        g_idx: int32 [K], the group of each input feature, or None when groups are consecutive.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor
    scheme: Scheme
    g_idx: Tensor | None = None
