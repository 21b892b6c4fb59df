"""AWQ `gemm`: 4-bit weights packed along the output, as AutoAWQ introduced it. May not touch files.

N out_features, K in_features, G groups. Tensors of a linear `X`:

    X.qweight  int32 [K, N / 8]   along N
    X.scales   float16 [G, N]
    X.qzeros   int32 [G, N / 8]   along N, zero points as they are

Field i of a word, from the lowest bits, holds output feature 0, 2, 4, 6, 1, 3, 5, 7 of its eight. K may be any multiple
of the group size; N must fill its words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.errors import CheckpointError, UnsupportedScheme
from quantkit.formats.base import TensorSpec
from quantkit.formats.common import (
    REQUANTIZE,
    expect,
    groups_of,
    holds_any,
    kept,
    names_in,
    only_scheme,
    read_scheme,
    require_groups,
    require_matrix,
    require_middle,
    require_multiple,
    require_packable,
    require_scale_dtype,
    require_shape,
    stored,
)
from quantkit.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.qweight import QuantizedWeight

CODES, SCALES, ZEROS = "qweight", "scales", "qzeros"
BITS, FIELDS = 4, 8  # bits of a code, codes in a word
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # field -> output feature
_FLOATS = ("F16", "BF16", "F32")  # of scales that are read


@dataclass(frozen=True, slots=True)
class Awq:
    """The Format of an AWQ checkpoint."""

    name: str = "awq"
    suffixes: tuple[str, ...] = (CODES, SCALES, ZEROS)
    scale_dtypes: tuple[str, ...] = ("F16",)

    def check(self, scheme: Scheme, shape: tuple[int, int], *, least_zero: int = 0) -> None:
        """Accept a weight [N, K] that engines can load; any zero point has a place.

        Raises:
            UnsupportedScheme: codes are not of 4 bits, groups do not tile K, or N does not fill whole words.
        """
        rows, columns = shape
        if scheme.bits != BITS:
            raise UnsupportedScheme(
                f"{scheme.bits}-bit codes have no place in `awq`", "use 4 bits, or another `--format`"
            )
        require_groups(scheme, columns)
        require_multiple(rows, FIELDS, "output", "the codes in a word")

    def specs(self, name: str, scheme: Scheme, shape: tuple[int, int], scale_dtype: str) -> dict[str, TensorSpec]:
        """List the tensors of a linear: name -> (safetensors dtype, shape)."""
        require_scale_dtype(scale_dtype, self.scale_dtypes)
        rows, columns = shape
        groups = groups_of(scheme, columns)
        return {
            f"{name}.{CODES}": ("I32", (columns, rows // FIELDS)),
            f"{name}.{SCALES}": (scale_dtype, (groups, rows)),
            f"{name}.{ZEROS}": ("I32", (groups, rows // FIELDS)),
        }

    def pack(self, name: str, q: QuantizedWeight) -> dict[str, Tensor]:
        """Lay a weight out as named tensors.

        Raises:
            UnsupportedScheme: its groups are not consecutive, or `check` refuses its scheme and shape.
            ValueError: the scale is not float16, or a symmetric weight has a zero point that is not in the middle.
        """
        require_packable(name, q, self.scale_dtypes)
        self.check(q.scheme, (q.codes.shape[0], q.codes.shape[1]))
        return {
            f"{name}.{CODES}": _pack(q.codes),
            f"{name}.{SCALES}": q.scale.T.contiguous(),
            f"{name}.{ZEROS}": _pack(q.zero_point),
        }

    def unpack(
        self, name: str, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int] | None = None
    ) -> QuantizedWeight:
        """Read a weight back; raises CheckpointError naming the tensor that does not fit the scheme."""
        from quantkit.qweight import QuantizedWeight

        codes = stored(f"{name}.{CODES}", tensors)
        columns, width = require_matrix(f"{name}.{CODES}", codes)
        rows = width * FIELDS
        require_shape(f"{name}.{CODES}", (rows, columns), scheme, shape)
        groups = groups_of(scheme, columns)
        expect(f"{name}.{CODES}", codes, ("I32",), (columns, width))
        scale = expect(f"{name}.{SCALES}", stored(f"{name}.{SCALES}", tensors), _FLOATS, (groups, rows))
        zeros = expect(f"{name}.{ZEROS}", stored(f"{name}.{ZEROS}", tensors), ("I32",), (groups, width))
        zero_point = _unpack(zeros)
        require_middle(f"{name}.{ZEROS}", zero_point, scheme)
        return QuantizedWeight(_unpack(codes), scale.T.contiguous(), zero_point, scheme)

    def config(self, schemes: Mapping[str, Scheme | None], *, fp8_cache: bool = False) -> dict[str, Any]:
        """Write the `quantization_config`. It has no place for an FP8 cache, and says nothing of symmetry.

        compat: readers refuse `zero_point: false` or lack a kernel for it, so symmetric linears are written with their
        zero points; without names in `modules_to_not_convert` vLLM guesses from dtypes, and guesses wrong.

        Raises:
            UnsupportedScheme: linears have several schemes or none, or a kept one has a name that is part of a packed
                one's, which readers would take for kept too.
        """
        scheme = only_scheme(self.name, schemes)
        names = kept(schemes)
        _require_apart(names, [name for name, each in schemes.items() if each is not None])
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": scheme.bits,
            "group_size": scheme.group_size,
            "zero_point": True,
            "modules_to_not_convert": names,
        }

    def files(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Nothing: readers take the config from config.json."""
        return {}

    def cache_specs(self, attention: str) -> dict[str, TensorSpec]:
        """Nothing: no engine loads scales of a cache from this format."""
        return {}

    def scheme_of(self, config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
        """Turn a config into a function from a linear's full name to its scheme; None means not packed.

        A name is kept where an entry of `modules_to_not_convert` is any part of it, as readers test it.

        Raises:
            CheckpointError: it names another layout, or codes of another width.
        """
        if config.get("quant_method", "awq") != "awq":
            raise CheckpointError(f"quantization_config: quant_method `{config['quant_method']}` is not awq")
        version = config.get("version", "gemm")
        if str(version).lower() != "gemm":
            raise CheckpointError(
                f"quantization_config: AWQ version `{version}` is not read here, only gemm", REQUANTIZE
            )
        zero_point = config.get("zero_point", True)
        if not isinstance(zero_point, bool):
            raise CheckpointError(f"quantization_config: `zero_point` is {zero_point!a:.80}, not true or false")
        bits = config.get("bits", config.get("w_bit"))
        if bits != BITS:
            raise CheckpointError(f"quantization_config: {bits!a:.20} bits are not read in AWQ, only 4", REQUANTIZE)
        size = config.get("group_size", config.get("q_group_size"))
        scheme = read_scheme("quantization_config", bits, size, not zero_point)
        is_kept = holds_any(names_in(config, "modules_to_not_convert"))
        return lambda name: None if is_kept(name) else scheme


def _require_apart(kept_names: list[str], packed: list[str]) -> None:
    if name := next(filter(holds_any(kept_names), packed), None):
        part = next(each for each in kept_names if each in name)
        raise UnsupportedScheme(
            f"`{part}` stays in 16 bit and is part of the name of `{name}`, which is packed: `awq` readers would take"
            " both for kept",
            "use `--format compressed-tensors`, or keep both with `--ignore`",
        )


def _pack(matrix: Tensor) -> Tensor:
    """Pack uint8 [N, M] as int32 [M, N / 8]."""
    import torch

    width = matrix.shape[1]
    features = matrix.reshape(-1, FIELDS, width)
    octets = torch.empty(len(features), width, 4, dtype=torch.uint8, device=matrix.device)
    for octet, (low, high) in enumerate(zip(ORDER[::2], ORDER[1::2], strict=True)):
        octets[..., octet] = (features[:, high] << BITS).bitwise_or_(features[:, low])
    # layout: the bytes of a word, low byte first, are the little-endian word
    return octets.view(-1).view(torch.int32).view(-1, width).T.contiguous()


def _unpack(packed: Tensor) -> Tensor:
    """Undo `_pack`."""
    import torch

    width, count = packed.shape
    octets = packed.T.contiguous().view(-1).view(torch.uint8).view(count, width, 4)
    features = torch.empty(count, FIELDS, width, dtype=torch.uint8, device=packed.device)
    for octet, (low, high) in enumerate(zip(ORDER[::2], ORDER[1::2], strict=True)):
        features[:, low] = octets[..., octet] & 0x0F
        features[:, high] = octets[..., octet] >> BITS
    return features.view(count * FIELDS, width)
