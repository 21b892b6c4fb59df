"""ModelOpt `W4A16_AWQ`: symmetric 4-bit weights that TensorRT-LLM loads. May not touch files.

N out_features, K in_features, G groups. Tensors of a linear `X`:

    X.weight           uint8 [N / 2, K]   code - 8 in two's complement; feature 2r in the low four bits, 2r + 1 above
    X.weight_scale     scale dtype [N, G]
    X.pre_quant_scale  scale dtype [K]    the input is multiplied by it; here always 1

TensorRT-LLM asks for `pre_quant_scale` of every linear that it does not fuse with others (attention output, down), and
ignores it elsewhere. Rescaling is folded into the weights here, so it is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from quantkit import __version__
from quantkit.errors import CheckpointError, UnsupportedScheme
from quantkit.formats.base import TensorSpec
from quantkit.formats.common import (
    REQUANTIZE,
    expect,
    groups_of,
    kept,
    names_in,
    only_scheme,
    read_scheme,
    require_groups,
    require_matrix,
    require_multiple,
    require_packable,
    require_scale_dtype,
    require_shape,
    stored,
    typed,
)
from quantkit.scheme import PER_CHANNEL, Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.qweight import QuantizedWeight

CODES, SCALE, PRE_SCALE = "weight", "weight_scale", "pre_quant_scale"
ALGORITHM = "W4A16_AWQ"
BITS = 4
_SIGN = 0x88  # flips the top bit of both codes in a byte: unsigned codes to code - 8, and back


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """The Format of a checkpoint for TensorRT-LLM."""

    name: str = "modelopt"
    suffixes: tuple[str, ...] = (CODES, SCALE, PRE_SCALE)
    scale_dtypes: tuple[str, ...] = ("BF16", "F16", "F32")

    def check(self, scheme: Scheme, shape: tuple[int, int], *, least_zero: int = 0) -> None:
        """Accept a weight [N, K] that TensorRT-LLM can load.

        Raises:
            UnsupportedScheme: codes are not symmetric ones of 4 bits, groups do not tile K or are whole rows, or N is
                odd.
        """
        rows, columns = shape
        if scheme.bits != BITS:
            raise UnsupportedScheme(
                f"{scheme.bits}-bit codes have no place in `modelopt`", "use 4 bits, or another `--format`"
            )
        if not scheme.symmetric:
            raise UnsupportedScheme(
                f"{scheme}: `modelopt` has no zero points", "use `--symmetric`, or another `--format`"
            )
        if scheme.group_size == PER_CHANNEL:
            raise UnsupportedScheme(
                f"{scheme}: TensorRT-LLM reads groups only", "pass `--group-size 128`, or another size"
            )
        require_groups(scheme, columns)
        require_multiple(rows, 2, "output", "the codes in a byte")

    def specs(self, name: str, scheme: Scheme, shape: tuple[int, int], scale_dtype: str) -> dict[str, TensorSpec]:
        """List the tensors of a linear: name -> (safetensors dtype, shape)."""
        require_scale_dtype(scale_dtype, self.scale_dtypes)
        rows, columns = shape
        return {
            f"{name}.{CODES}": ("U8", (rows // 2, columns)),
            f"{name}.{SCALE}": (scale_dtype, (rows, groups_of(scheme, columns))),
            f"{name}.{PRE_SCALE}": (scale_dtype, (columns,)),
        }

    def pack(self, name: str, q: QuantizedWeight) -> dict[str, Tensor]:
        """Lay a weight out as named tensors.

        Raises:
            UnsupportedScheme: its groups are not consecutive, or `check` refuses its scheme and shape.
            ValueError: the scale has no 16- or 32-bit float dtype, or a zero point is not in the middle.
        """
        require_packable(name, q, self.scale_dtypes)
        self.check(q.scheme, (q.codes.shape[0], q.codes.shape[1]))
        pairs = q.codes[1::2] << BITS
        pairs |= q.codes[0::2]
        return {
            f"{name}.{CODES}": pairs.bitwise_xor_(_SIGN).contiguous(),
            f"{name}.{SCALE}": q.scale.contiguous(),
            f"{name}.{PRE_SCALE}": q.scale.new_ones(q.codes.shape[1]),
        }

    def unpack(
        self, name: str, tensors: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int] | None = None
    ) -> QuantizedWeight:
        """Read a weight back.

        Raises:
            CheckpointError: a tensor does not fit the scheme, or inputs are scaled, which codes cannot say.
        """
        import torch

        from quantkit.qweight import QuantizedWeight

        packed = stored(f"{name}.{CODES}", tensors)
        half, columns = require_matrix(f"{name}.{CODES}", packed)
        rows = 2 * half
        require_shape(f"{name}.{CODES}", (rows, columns), scheme, shape)
        expect(f"{name}.{CODES}", packed, ("U8",), (half, columns))
        groups = groups_of(scheme, columns)
        scale = expect(f"{name}.{SCALE}", stored(f"{name}.{SCALE}", tensors), self.scale_dtypes, (rows, groups))
        _require_ones(f"{name}.{PRE_SCALE}", tensors.get(f"{name}.{PRE_SCALE}"))
        unsigned = packed ^ _SIGN
        codes = torch.empty(rows, columns, dtype=torch.uint8, device=packed.device)
        torch.bitwise_and(unsigned, 0x0F, out=codes[0::2])
        torch.bitwise_right_shift(unsigned, BITS, out=codes[1::2])
        zero_point = torch.full(scale.shape, scheme.midpoint, dtype=torch.uint8, device=scale.device)
        return QuantizedWeight(codes, scale, zero_point, scheme)

    def config(self, schemes: Mapping[str, Scheme | None], *, fp8_cache: bool = False) -> dict[str, Any]:
        """Write the `quantization_config` of config.json, in the flat shape of ModelOpt 1.0.

        Without a packed linear, `quant_algo` is null and only the cache is described.

        Raises:
            UnsupportedScheme: linears have several schemes, or none and the cache no scales either.
        """
        packed = {name: each for name, each in schemes.items() if each is not None}
        config: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": None}
        if packed or not fp8_cache:
            size = only_scheme(self.name, packed).group_size
            config |= {"quant_algo": ALGORITHM, "group_size": size, "has_zero_point": False, "pre_quant_scale": True}
        if fp8_cache:
            config["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
        return config | {"ignore": kept(schemes), "producer": {"name": "quantkit", "version": __version__}}

    def files(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """`hf_quant_config.json`, the same in the nested shape, which TensorRT-LLM reads first."""
        shared = ("quant_algo", "group_size", "has_zero_point", "pre_quant_scale")
        quantization = {key: config[key] for key in shared if key in config}
        quantization["kv_cache_quant_algo"] = "FP8" if config.get("kv_cache_scheme") else None
        quantization["exclude_modules"] = list(config["ignore"])
        return {"hf_quant_config.json": {"producer": dict(config["producer"]), "quantization": quantization}}

    def cache_specs(self, attention: str) -> dict[str, TensorSpec]:
        """Scales of K and of V, beside the projections that feed the cache."""
        return {f"{attention}.k_proj.k_scale": ("F32", ()), f"{attention}.v_proj.v_scale": ("F32", ())}

    def scheme_of(self, config: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
        """Turn a config of either shape into a function from a linear's full name to its scheme; None: not packed.

        Entries of `ignore` and `exclude_modules` may hold `*`, and keep all that is inside a module they name.

        Raises:
            CheckpointError: it names another algorithm, or codes with zero points.
        """
        if config.get("quant_method", "modelopt") != "modelopt":
            raise CheckpointError(f"quantization_config: quant_method `{config['quant_method']}` is not modelopt")
        inner: Mapping[str, Any] = typed(config, "quantization", dict) or config
        algorithm = inner.get("quant_algo")
        if algorithm is None and not inner.get("quantized_layers"):
            return lambda name: None
        if algorithm != ALGORITHM or inner.get("has_zero_point"):
            reason = "zero points" if algorithm == ALGORITHM else f"`{algorithm}`"
            raise CheckpointError(
                f"quantization_config: ModelOpt {reason} cannot be read, only {ALGORITHM}", REQUANTIZE
            )
        scheme = read_scheme("quantization_config", BITS, inner.get("group_size"), True)
        patterns = [*names_in(inner, "ignore"), *names_in(inner, "exclude_modules")]
        exact = frozenset(patterns)
        wild = [pattern for pattern in patterns if set(pattern) & set("*?[")]

        def scheme_of(name: str) -> Scheme | None:
            parts = name.split(".")
            owners = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
            hidden = any(owner in exact or any(fnmatchcase(owner, each) for each in wild) for owner in owners)
            return None if hidden else scheme

        return scheme_of


def _require_ones(name: str, tensor: Tensor | None) -> None:
    if tensor is not None and bool((tensor != 1).any()):
        raise CheckpointError(
            f"`{name}` scales the inputs of the linear, which codes and scales of the weight cannot say",
            REQUANTIZE,
        )
