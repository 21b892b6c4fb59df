"""On-disk formats by name. A new one is a file here and a row below. Imports no torch."""

from __future__ import annotations

from quantkit.formats.base import Format
from quantkit.formats.compressed_tensors import CompressedTensors

FORMATS: dict[str, Format] = {each.name: each for each in (CompressedTensors(),)}

__all__ = ["FORMATS", "Format"]
