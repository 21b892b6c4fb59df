"""The weights of a directory, packed or not, by the names of the plain model: `X.weight` whatever the file holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.checkpoint.header import TensorInfo
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.formats import FORMATS
from quantkit.formats.base import Format
from quantkit.ops.affine import dequantize
from quantkit.qweight import QuantizedWeight
from quantkit.scheme import Scheme

DAMAGED = "the artifact is damaged: copy it again, or quantize again"


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A checkpoint whose packed linears read like plain ones.

    Attributes:
        checkpoint: the directory.
        format: how its linears are packed; None for a plain checkpoint.
        schemes: {linear: scheme} of the packed ones.
        tensors: every tensor of the plain model, sorted by name, and how it is stored; None for a packed linear.
    """

    checkpoint: Checkpoint
    format: Format | None
    schemes: dict[str, Scheme]
    tensors: dict[str, TensorInfo | None]

    @classmethod
    def open(cls, path: Path) -> WeightSource:
        """Open a directory and read from its config how it is packed.

        Raises:
            CheckpointError: it cannot be read, or is packed in a way that no format here reads.
        """
        checkpoint = Checkpoint.open(path)
        config = checkpoint.config.get("quantization_config")
        if not config:
            return cls(checkpoint, None, {}, dict(checkpoint.tensors))
        fmt = _format_of(path, config)
        scheme_of = fmt.scheme_of(config)
        marker = f".{fmt.suffixes[0]}"
        packed = [name.removesuffix(marker) for name in checkpoint.tensors if name.endswith(marker)]
        schemes = {name: _required(scheme_of(name), name) for name in packed}
        if twice := next((name for name in packed if f"{name}.weight" in checkpoint.tensors), None):
            raise CheckpointError(f"`{twice}` is in `{path}` both packed and as `{twice}.weight`", DAMAGED)
        owned = {f"{name}.{suffix}" for name in packed for suffix in fmt.suffixes}
        plain = {name: info for name, info in checkpoint.tensors.items() if name not in owned}
        names = sorted([*plain, *(f"{name}.weight" for name in packed)])
        return cls(checkpoint, fmt, schemes, {name: plain.get(name) for name in names})

    def quantized(self, linear: str) -> QuantizedWeight:
        """Read one packed linear."""
        assert self.format is not None
        stored = [f"{linear}.{suffix}" for suffix in self.format.suffixes]
        tensors = self.checkpoint.read(name for name in stored if name in self.checkpoint.tensors)
        try:
            return self.format.unpack(linear, tensors, self.schemes[linear])
        except CheckpointError as error:
            raise CheckpointError(error.message, error.hint or DAMAGED) from None

    def read_for(
        self, module: nn.Module, tensors: Mapping[str, str], dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Read {parameter of `module`: tensor name}; see `read`.

        Raises:
            CheckpointError: a weight has another shape than its parameter, which only the read of a packed one shows.
        """
        found = {}
        for name, tensor in tensors.items():
            weight = self.read([tensor], dtype)[tensor]
            owner, _, leaf = name.rpartition(".")
            wanted = getattr(module.get_submodule(owner), leaf).shape
            if weight.shape != wanted:
                raise CheckpointError(
                    f"`{tensor}` is {list(weight.shape)}, and the model has {list(wanted)}",
                    "the config may belong to another model",
                )
            found[name] = weight
        return found

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Read tensors by the plain model's names; packed ones are dequantized.

        Args:
            dtype: of floating-point results; None keeps what is stored (for packed linears, the dtype of their scales).
        """
        found = {}
        for name in names:
            linear = name.removesuffix(".weight")
            if linear in self.schemes and name not in self.checkpoint.tensors:
                q = self.quantized(linear)
                found[name] = dequantize(q, dtype or q.scale.dtype)
            else:
                tensor = self.checkpoint.read([name])[name]
                found[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        return found


def _format_of(path: Path, config: Any) -> Format:
    method = config.get("quant_method") if isinstance(config, dict) else config
    if not isinstance(method, str) or method not in FORMATS:
        raise CheckpointError(
            f"`{path}` is quantized as `{method}`, which is not read here", f"formats that are: {', '.join(FORMATS)}"
        )
    return FORMATS[method]


def _required(scheme: Scheme | None, name: str) -> Scheme:
    if scheme is None:
        raise CheckpointError(
            f"`{name}` is packed, but `quantization_config` gives it no scheme",
            "the config does not belong to the weights",
        )
    return scheme
