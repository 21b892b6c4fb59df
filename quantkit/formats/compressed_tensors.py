"""compressed-tensors `pack-quantized`: integer weights that vLLM, SGLang and transformers load. May not touch files.

N out_features, K in_features, G groups, c = 32 / bits codes in a word. Tensors of a linear `X`:

    X.weight_packed      int32 [N, ceil(K / c)]   along K, first code in the lowest bits
    X.weight_scale       scale dtype [N, G]
    X.weight_shape       int64 [2]                N, K
    X.weight_zero_point  int32 [ceil(N / c), G]   along N; asymmetric only

The reader sees signed values and an offset of 2^(bits-1); packed bits are the unsigned codes and zero points.
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
    require_multiple,
    require_packable,
    require_scale_dtype,
    require_shape,
    stored,
    words,
)
from quantkit.formats.compressed_tensors_config import read_config, write_config
from quantkit.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.qweight import QuantizedWeight

PACKED, SCALE, SHAPE, ZERO_POINT = "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The Format of quantkit's default artifact."""

    name: str = "compressed-tensors"
    suffixes: tuple[str, ...] = (PACKED, SCALE, SHAPE, ZERO_POINT)
    scale_dtypes: tuple[str, ...] = ("BF16", "F16", "F32")

    def check(self, scheme: Scheme, shape: tuple[int, int], *, least_zero: int = 0) -> None:
        """Accept a weight [N, K] that engines can load; any zero point has a place.

        Raises:
            UnsupportedScheme: groups do not tile K, or codes do not fill whole words.
        """
        rows, columns = shape
        codes = 32 // scheme.bits
        require_groups(scheme, columns)
        require_multiple(columns, codes, "input", f"the {scheme.bits}-bit codes in a word")
        if not scheme.symmetric and rows % codes:
            raise UnsupportedScheme(
                f"{rows:,} output features are not a multiple of {codes}, the {scheme.bits}-bit zero points in a word",
                "use `--symmetric`, or keep this linear in 16 bit with `--ignore`",
            )

    def specs(self, name: str, scheme: Scheme, shape: tuple[int, int], scale_dtype: str) -> dict[str, TensorSpec]:
        """List the tensors of a linear: name -> (safetensors dtype, shape)."""
        require_scale_dtype(scale_dtype, self.scale_dtypes)
        rows, columns = shape
        groups = groups_of(scheme, columns)
        found: dict[str, TensorSpec] = {
            f"{name}.{PACKED}": ("I32", (rows, words(columns, scheme.bits))),
            f"{name}.{SCALE}": (scale_dtype, (rows, groups)),
            f"{name}.{SHAPE}": ("I64", (2,)),
        }
        if not scheme.symmetric:
            found[f"{name}.{ZERO_POINT}"] = ("I32", (words(rows, scheme.bits), groups))
        return found

    def pack(self, name: str, q: QuantizedWeight) -> dict[str, Tensor]:
        """Lay a weight out as named tensors.

        Raises:
            UnsupportedScheme: its groups are not consecutive.
            ValueError: the scale is no float of 16 or 32 bits, or a symmetric weight has a zero point that is not in
                the middle, which this layout cannot say.
        """
        import torch

        from quantkit.ops.pack import pack_int32

        require_packable(name, q, self.scale_dtypes)
        found = {
            f"{name}.{PACKED}": pack_int32(q.codes, q.scheme.bits),
            f"{name}.{SCALE}": q.scale.contiguous(),
            f"{name}.{SHAPE}": torch.tensor(q.codes.shape, dtype=torch.int64),
        }
        if not q.scheme.symmetric:
            found[f"{name}.{ZERO_POINT}"] = pack_int32(q.zero_point.T, q.scheme.bits).T.contiguous()
        return found

    def unpack(
        self, name: str, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int] | None = None
    ) -> QuantizedWeight:
        """Read a weight back; raises CheckpointError naming the tensor that does not fit the scheme."""
        import torch

        from quantkit.ops.pack import unpack_int32
        from quantkit.qweight import QuantizedWeight

        if f"{name}.weight_g_idx" in tensors:
            raise CheckpointError(f"`{name}.weight_g_idx`: groups that are not consecutive cannot be read")
        rows, columns = self._shape(name, tensors, scheme, shape)
        groups = groups_of(scheme, columns)

        def checked(suffix: str, dtypes: tuple[str, ...], size: tuple[int, int]) -> Tensor:
            return expect(f"{name}.{suffix}", stored(f"{name}.{suffix}", tensors), dtypes, size)

        packed = checked(PACKED, ("I32",), (rows, words(columns, scheme.bits)))
        scale = checked(SCALE, self.scale_dtypes, (rows, groups))
        if scheme.symmetric:
            zero_point = torch.full(scale.shape, scheme.midpoint, dtype=torch.uint8, device=scale.device)
        else:
            zeros = checked(ZERO_POINT, ("I32",), (words(rows, scheme.bits), groups))
            zero_point = unpack_int32(zeros.T, scheme.bits, rows).T.contiguous()
        return QuantizedWeight(unpack_int32(packed, scheme.bits, columns), scale, zero_point, scheme)

    def config(self, schemes: Mapping[str, Scheme | None], *, fp8_cache: bool = False) -> dict[str, Any]:
        """Write the `quantization_config`; see `write_config`."""
        return write_config(schemes, fp8_cache=fp8_cache)

    def files(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Nothing: readers take the config from config.json."""
        return {}

    def cache_specs(self, attention: str) -> dict[str, TensorSpec]:
        """Scales of K and of V, beside the attention module's projections."""
        return {f"{attention}.k_scale": ("F32", (1,)), f"{attention}.v_scale": ("F32", (1,))}

    def scheme_of(self, config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
        """Read a `quantization_config`; see `read_config`."""
        return read_config(config)

    def _shape(
        self, name: str, tensors: Mapping[str, Tensor], scheme: Scheme, expected: tuple[int, int] | None
    ) -> tuple[int, int]:
        """Read [N, K] from `weight_shape`; packing alone does not tell K."""
        tensor = stored(f"{name}.{SHAPE}", tensors)
        held = tensor.flatten().tolist()
        if len(held) != 2 or tensor.is_floating_point() or min(held) < 1:
            raise CheckpointError(f"`{name}.{SHAPE}` holds {held}, not [out_features, in_features]")
        shape = (int(held[0]), int(held[1]))
        require_shape(f"{name}.{SHAPE}", shape, scheme, expected)
        return shape
