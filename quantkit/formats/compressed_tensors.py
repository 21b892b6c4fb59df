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
from quantkit.formats.compressed_tensors_config import read_config, write_config
from quantkit.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.qweight import QuantizedWeight

PACKED, SCALE, SHAPE, ZERO_POINT = "weight_packed", "weight_scale", "weight_shape", "weight_zero_point"
_SCALE_DTYPES = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The Format of quantkit's default artifact."""

    name: str = "compressed-tensors"
    suffixes: tuple[str, ...] = (PACKED, SCALE, SHAPE, ZERO_POINT)

    def check(self, scheme: Scheme, shape: tuple[int, int]) -> None:
        """Accept a weight [N, K] that engines can load.

        Raises:
            UnsupportedScheme: groups do not tile K, or codes do not fill whole words.
        """
        rows, columns = shape
        codes = 32 // scheme.bits
        if not scheme.fits(columns):
            usual = next((f"pass `--group-size {size}`, or " for size in (128, 64, 32) if columns % size == 0), "")
            raise UnsupportedScheme(
                f"{columns:,} input features are not a multiple of group size {scheme.group_size}",
                f"{usual}choose with `--indivisible` what happens to such linears",
            )
        if columns % codes:
            raise UnsupportedScheme(
                f"{columns:,} input features are not a multiple of {codes}, the {scheme.bits}-bit codes in a word",
                "keep this linear in 16 bit with `--ignore`",
            )
        if not scheme.symmetric and rows % codes:
            raise UnsupportedScheme(
                f"{rows:,} output features are not a multiple of {codes}, the {scheme.bits}-bit zero points in a word",
                "use `--symmetric`, or keep this linear in 16 bit with `--ignore`",
            )

    def specs(self, name: str, scheme: Scheme, shape: tuple[int, int], scale_dtype: str) -> dict[str, TensorSpec]:
        """List the tensors of a linear: name -> (safetensors dtype, shape)."""
        if scale_dtype not in _SCALE_DTYPES:
            raise ValueError(f"scale_dtype is {scale_dtype!r}, and must be one of {_SCALE_DTYPES}")
        rows, columns = shape
        groups = columns // scheme.group(columns)
        found: dict[str, TensorSpec] = {
            f"{name}.{PACKED}": ("I32", (rows, _words(columns, scheme.bits))),
            f"{name}.{SCALE}": (scale_dtype, (rows, groups)),
            f"{name}.{SHAPE}": ("I64", (2,)),
        }
        if not scheme.symmetric:
            found[f"{name}.{ZERO_POINT}"] = ("I32", (_words(rows, scheme.bits), groups))
        return found

    def pack(self, name: str, q: QuantizedWeight) -> dict[str, Tensor]:
        """Lay a weight out as named tensors.

        Raises:
            UnsupportedScheme: its groups are not consecutive.
            ValueError: it is symmetric and a zero point is not in the middle, which this layout cannot say.
        """
        import torch

        from quantkit.ops.pack import pack_int32

        if q.g_idx is not None:
            raise UnsupportedScheme(f"`{name}` has a group index, which engines no longer load in this format")
        if q.scheme.symmetric and bool((q.zero_point != q.scheme.midpoint).any()):
            raise ValueError(f"`{name}` is symmetric with a zero point other than {q.scheme.midpoint}")
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
        rows, columns = self._shape(name, tensors, shape)
        if not scheme.fits(columns):
            raise CheckpointError(f"`{name}` has {columns:,} input features, no multiple of {scheme.group_size}")
        scale = _tensor(name, SCALE, tensors)
        dtype = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}.get(scale.dtype)
        if dtype is None:
            raise CheckpointError(f"`{name}.{SCALE}` is {_kind(scale)}, not a 16-bit float")
        for tensor_name, (_, size) in self.specs(name, scheme, (rows, columns), dtype).items():
            suffix = tensor_name.removeprefix(f"{name}.")
            _expect(tensor_name, _tensor(name, suffix, tensors), size, integer=suffix in (PACKED, ZERO_POINT))
        if scheme.symmetric:
            zero_point = torch.full(scale.shape, scheme.midpoint, dtype=torch.uint8, device=scale.device)
        else:
            zero_point = unpack_int32(tensors[f"{name}.{ZERO_POINT}"].T, scheme.bits, rows).T.contiguous()
        codes = unpack_int32(tensors[f"{name}.{PACKED}"], scheme.bits, columns)
        return QuantizedWeight(codes, scale, zero_point, scheme)

    def config(self, schemes: Mapping[str, Scheme | None]) -> dict[str, Any]:
        """Write the `quantization_config`; see `write_config`."""
        return write_config(schemes)

    def scheme_of(self, config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
        """Read a `quantization_config`; see `read_config`."""
        return read_config(config)

    def _shape(self, name: str, tensors: Mapping[str, Tensor], expected: tuple[int, int] | None) -> tuple[int, int]:
        """Read [N, K] from `weight_shape`; packing alone does not tell K."""
        tensor = _tensor(name, SHAPE, tensors)
        stored = tensor.flatten().tolist()
        if len(stored) != 2 or tensor.is_floating_point() or min(stored) < 1:
            raise CheckpointError(f"`{name}.{SHAPE}` holds {stored}, not [out_features, in_features]")
        shape = (int(stored[0]), int(stored[1]))
        if expected is not None and shape != tuple(expected):
            raise CheckpointError(f"`{name}.{SHAPE}` holds {list(shape)}, and the model has {list(expected)}")
        return shape


def _words(count: int, bits: int) -> int:
    # the twin of ops.pack.words, so that planning needs no torch
    return -(-count * bits // 32)


def _tensor(name: str, suffix: str, tensors: Mapping[str, Tensor]) -> Tensor:
    try:
        return tensors[f"{name}.{suffix}"]
    except KeyError:
        raise CheckpointError(f"`{name}.{suffix}` is missing") from None


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...], *, integer: bool) -> None:
    import torch

    if tuple(tensor.shape) != shape or (integer and tensor.dtype != torch.int32):
        wanted = f"int32 {list(shape)}" if integer else f"{list(shape)}"
        raise CheckpointError(f"`{name}` is {_kind(tensor)}, and the scheme asks for {wanted}")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
