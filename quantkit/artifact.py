"""One artifact of a run while it is written: a format, the files of its folder, and what storing cost its scales."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quantkit.checkpoint.reader import Checkpoint
from quantkit.checkpoint.writer import ArtifactWriter
from quantkit.formats import Format
from quantkit.formats.base import stored_dtype
from quantkit.formats.kv_cache import CacheScales
from quantkit.formats.scales import Moved, cast_scale
from quantkit.qweight import QuantizedWeight


@dataclass(slots=True)
class Artifact:
    """A folder that is being written.

    Attributes:
        scale_dtype: safetensors dtype to which scales were rounded when the codes were chosen.
        moved: scales that the format could not store as they were.
    """

    format: Format
    writer: ArtifactWriter
    scale_dtype: str
    moved: Moved = field(default_factory=Moved)

    def pack(self, quantized: Mapping[str, QuantizedWeight]) -> None:
        """Write linears, by full name.

        Raises:
            UnsupportedScheme: the format cannot store one; names it.
        """
        for name, q in quantized.items():
            stored = cast_scale(name, q, stored_dtype(self.format, self.scale_dtype))
            self.moved = self.moved.plus(name, q.scale, stored.scale)
            self.writer.write(self.format.pack(name, stored))

    def write(self, tensors: Mapping[str, Tensor], source: Checkpoint, copied: Iterable[str]) -> None:
        """Write tensors that stay plain, and copy the bytes of those that stay as they are."""
        self.writer.write(tensors)
        self.writer.copy(source, copied)

    def write_cache_scales(self, scales: Mapping[str, CacheScales]) -> None:
        """Write the scales of {attention module: scales}, where the format has a place for them."""
        for attention, each in scales.items():
            specs = self.format.cache_specs(attention)
            values = zip(specs.items(), (each.k, each.v), strict=bool(specs))
            self.writer.write({name: torch.full(shape, value) for (name, (_, shape)), value in values})
