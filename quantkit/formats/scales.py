"""Scales in the dtype that a format stores: what a cast moves is counted, what it destroys is refused.

Codes and zero points have one value in every format; the dtype of the scales is all that can differ.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quantkit.errors import UnsupportedScheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.qweight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class Moved:
    """Scales that a cast changed.

    Attributes:
        total: scales looked at.
        moved: those with another value afterwards.
        largest: the largest relative change |after - before| / |before|.
        where: the linear that has it, "" where nothing moved.
    """

    total: int = 0
    moved: int = 0
    largest: float = 0.0
    where: str = ""

    def plus(self, name: str, before: Tensor, after: Tensor) -> Moved:
        """Count the scales of one more linear, in the same shape before and after."""
        old, new = before.double(), after.double()
        changed = old != new
        moved = int(changed.sum())
        largest = float(((new - old).abs() / old.abs())[changed].max()) if moved else 0.0
        largest, where = (largest, name) if largest > self.largest else (self.largest, self.where)
        return Moved(self.total + before.numel(), self.moved + moved, largest, where)

    def line(self) -> str:
        """Say it in one line."""
        if not self.moved:
            return f"{self.total:,} scales, all stored as they were"
        by = f"{self.largest:.2%}" if self.largest >= 1e-4 else "less than 0.01%"
        return f"{self.moved:,} of {self.total:,} scales moved, the furthest by {by} in {self.where}"

    def to_json(self) -> dict[str, Any]:
        """The counts as JSON values."""
        return {"total": self.total, "moved": self.moved, "largest": self.largest, "where": self.where}


def cast_scale(name: str, q: QuantizedWeight, dtype: str) -> QuantizedWeight:
    """Round the scale of the linear `name` to what a file can hold; codes and zero points stay.

    Args:
        dtype: of the stored scale, as safetensors names it: "F16", "BF16" or "F32".

    Raises:
        UnsupportedScheme: a scale would become 0 or infinite, which would change the weight altogether.
    """
    import torch

    wanted = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[dtype]
    if q.scale.dtype == wanted:
        return q
    scale = q.scale.to(wanted)
    lost = ((scale == 0) & (q.scale != 0)) | ~torch.isfinite(scale)
    if bool(lost.any()):
        value = float(q.scale[lost][0])
        raise UnsupportedScheme(
            f"`{name}` has a scale of {value:.3g}, which is {float(scale[lost][0]):g} as {dtype}",
            "use `--format compressed-tensors`, which stores it as it is, or keep this linear in 16 bit",
        )
    return replace(q, scale=scale)
