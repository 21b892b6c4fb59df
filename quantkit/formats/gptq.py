"""GPTQ: integer weights packed along the input, as AutoGPTQ introduced it. May not touch files.

N out_features, K in_features, G groups, c = 32 / bits codes in a word. Tensors of a linear `X`:

    X.qweight  int32 [K / c, N]   along K, first code in the lowest bits
    X.scales   float16 [G, N]
    X.qzeros   int32 [G, N / c]   along N; version 1 stores the zero point minus one, version 2 as it is
    X.g_idx    int32 [K]          the group of each input feature

Version 1 is what every engine reads, so it is what is written. A zero point of 0 has no place in it: 0 - 1 borrows
from the neighbouring field, and 2^bits - 1 + 1 is 0 to some readers and 2^bits to others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.errors import CheckpointError, UnsupportedScheme
from quantkit.formats.base import TensorSpec
from quantkit.formats.common import (
    expect,
    groups_of,
    require_groups,
    require_matrix,
    require_middle,
    require_multiple,
    require_packable,
    require_scale_dtype,
    require_shape,
    stored,
    words,
)
from quantkit.formats.gptq_config import read_config, write_config
from quantkit.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.qweight import QuantizedWeight

CODES, SCALES, ZEROS, INDEX = "qweight", "scales", "qzeros", "g_idx"
_TILE = 32  # GPTQModel packs, and the kernels of vLLM read, 32 by 32
_FLOATS = ("F16", "BF16", "F32")  # of scales that are read


@dataclass(frozen=True, slots=True)
class Gptq:
    """The Format of a GPTQ checkpoint.

    Attributes:
        zero_offset: what is subtracted from a zero point before it is stored: 1 in version 1, 0 in version 2.
    """

    name: str = "gptq"
    suffixes: tuple[str, ...] = (CODES, SCALES, ZEROS, INDEX)
    scale_dtypes: tuple[str, ...] = ("F16",)
    zero_offset: int = 1

    def check(self, scheme: Scheme, shape: tuple[int, int], *, least_zero: int = 0) -> None:
        """Accept a weight [N, K] that engines can load.

        Raises:
            UnsupportedScheme: groups do not tile K, a side is no multiple of 32, or a zero point may be 0.
        """
        rows, columns = shape
        require_groups(scheme, columns)
        require_multiple(columns, _TILE, "input", "the side of a tile in this format")
        require_multiple(rows, _TILE, "output", "the side of a tile in this format")
        if not scheme.symmetric and least_zero < self.zero_offset:
            raise UnsupportedScheme(
                f"{scheme}: this format stores zero points minus one, and 0 would wrap into its neighbour;"
                " vLLM and GPTQModel refuse such checkpoints",
                "use `--symmetric`, or `--format compressed-tensors` or `awq`",
            )

    def specs(self, name: str, scheme: Scheme, shape: tuple[int, int], scale_dtype: str) -> dict[str, TensorSpec]:
        """List the tensors of a linear: name -> (safetensors dtype, shape)."""
        require_scale_dtype(scale_dtype, self.scale_dtypes)
        rows, columns = shape
        groups = groups_of(scheme, columns)
        return {
            f"{name}.{CODES}": ("I32", (words(columns, scheme.bits), rows)),
            f"{name}.{SCALES}": (scale_dtype, (groups, rows)),
            f"{name}.{ZEROS}": ("I32", (groups, words(rows, scheme.bits))),
            f"{name}.{INDEX}": ("I32", (columns,)),
        }

    def pack(self, name: str, q: QuantizedWeight) -> dict[str, Tensor]:
        """Lay a weight out as named tensors.

        Raises:
            UnsupportedScheme: its groups are not consecutive, or a zero point is 0.
            ValueError: the scale is not float16, or a symmetric weight has a zero point that is not in the middle.
        """
        from quantkit.ops.pack import pack_int32

        require_packable(name, q, self.scale_dtypes, "decode it with `quantkit dequantize`, or leave it as it is")
        if self.zero_offset and bool((q.zero_point < self.zero_offset).any()):
            raise UnsupportedScheme(
                f"`{name}` has a zero point of 0: this format stores it minus one, which wraps into its neighbour",
                "use `--symmetric`, or `--format compressed-tensors` or `awq`",
            )
        return {
            f"{name}.{CODES}": pack_int32(q.codes, q.scheme.bits).T.contiguous(),
            f"{name}.{SCALES}": q.scale.T.contiguous(),
            f"{name}.{ZEROS}": pack_int32((q.zero_point - self.zero_offset).T, q.scheme.bits),
            f"{name}.{INDEX}": _consecutive(q.codes.shape[1], q.scheme),
        }

    def unpack(
        self, name: str, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int] | None = None
    ) -> QuantizedWeight:
        """Read a weight back; `g_idx` is set only where groups are not consecutive.

        Raises:
            CheckpointError: a tensor does not fit the scheme, or a zero point cannot be told.
        """
        from quantkit.ops.pack import unpack_int32
        from quantkit.qweight import QuantizedWeight

        bits = scheme.bits
        lines, rows = require_matrix(f"{name}.{CODES}", stored(f"{name}.{CODES}", tensors))
        index = tensors.get(f"{name}.{INDEX}")
        columns = lines * 32 // bits if index is None else index.numel()
        require_shape(f"{name}.{CODES}", (rows, columns), scheme, shape)
        groups = groups_of(scheme, columns)

        def checked(suffix: str, dtypes: tuple[str, ...], size: tuple[int, ...]) -> Tensor:
            return expect(f"{name}.{suffix}", stored(f"{name}.{suffix}", tensors), dtypes, size)

        codes = checked(CODES, ("I32",), (words(columns, bits), rows))
        scale = checked(SCALES, _FLOATS, (groups, rows))
        zeros = checked(ZEROS, ("I32",), (groups, words(rows, bits)))
        if index is not None:
            expect(f"{name}.{INDEX}", index, ("I32",), (columns,))
        return QuantizedWeight(
            codes=unpack_int32(codes.T, bits, columns),
            scale=scale.T.contiguous(),
            zero_point=self._zero_point(f"{name}.{ZEROS}", unpack_int32(zeros, bits, rows).T.contiguous(), scheme),
            scheme=scheme,
            g_idx=_irregular(f"{name}.{INDEX}", index, scheme, groups),
        )

    def config(self, schemes: Mapping[str, Scheme | None], *, fp8_cache: bool = False) -> dict[str, Any]:
        """Write the `quantization_config`; see `write_config`. It has no place for an FP8 cache."""
        return write_config(schemes, self.zero_offset)

    def files(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """`quantize_config.json`, the config once more, which AutoGPTQ and its readers look for."""
        return {"quantize_config.json": dict(config)}

    def cache_specs(self, attention: str) -> dict[str, TensorSpec]:
        """Nothing: no engine loads scales of a cache from this format."""
        return {}

    def scheme_of(self, config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
        """Read a `quantization_config`; see `read_config`."""
        return read_config(config, self.zero_offset)

    def _zero_point(self, name: str, fields: Tensor, scheme: Scheme) -> Tensor:
        """Zero points [N, G] of what is stored."""
        if self.zero_offset and not scheme.symmetric and bool((fields == scheme.qmax).any()):
            raise CheckpointError(
                f"`{name}` stores {scheme.qmax}, which readers take for a zero point of 0 or of {scheme.qmax + 1}",
                "quantize again, symmetric or in another format",
            )
        zero_point = fields.add_(self.zero_offset)  # where it wraps to 0 it is not the middle either
        require_middle(name, zero_point, scheme)
        return zero_point


def _consecutive(columns: int, scheme: Scheme) -> Tensor:
    import torch

    return torch.arange(columns, dtype=torch.int32) // scheme.group(columns)


def _irregular(name: str, index: Tensor | None, scheme: Scheme, groups: int) -> Tensor | None:
    """The group of each input feature where it is not what it would be without; compat: old files have none."""
    import torch

    if index is None or torch.equal(index, _consecutive(index.numel(), scheme).to(index.device)):
        return None
    if int(index.min()) < 0 or int(index.max()) >= groups:
        raise CheckpointError(f"`{name}` names group {int(index.min())} to {int(index.max())}, and there are {groups}")
    return index
