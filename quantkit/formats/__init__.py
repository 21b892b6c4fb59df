"""On-disk formats by name. A new one is a file here and a row below. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantkit.formats.awq import Awq
from quantkit.formats.base import Format
from quantkit.formats.compressed_tensors import CompressedTensors
from quantkit.formats.gptq import Gptq
from quantkit.formats.gptq_config import zero_offset_of
from quantkit.formats.modelopt import ModelOpt

FORMATS: dict[str, Format] = {each.name: each for each in (CompressedTensors(), Gptq(), Awq(), ModelOpt())}


def reader_of(config: Mapping[str, Any]) -> Format | None:
    """The format that reads a checkpoint with this `quantization_config`; None where its method is not known.

    It need not be one of FORMATS: GPTQ is also read in its second version, which is never written.
    """
    method = config.get("quant_method")
    if method == "gptq" and zero_offset_of(config) == 0:
        return Gptq(zero_offset=0)
    return FORMATS.get(method) if isinstance(method, str) else None


__all__ = ["FORMATS", "Format", "reader_of"]
