"""The weights of a directory, packed or not, by the names of the plain model: `X.weight` whatever the file holds.

Opening it and asking for shapes reads headers and imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.checkpoint.header import TensorInfo
from quantkit.checkpoint.locate import read_json_object
from quantkit.checkpoint.reader import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.formats import FORMATS, reader_of
from quantkit.formats.base import Format
from quantkit.formats.kv_cache import CacheScales, cache_scale_owner
from quantkit.scheme import Scheme

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from quantkit.qweight import QuantizedWeight

DAMAGED = "the artifact is damaged: copy it again, or quantize again"
CONFIG_KEYS = ("quantization_config", "compression_config")  # compat: the second is what releases of 2024 wrote
# compat: where tools say what they packed if config.json does not, and the method of a file that does not name it
CONFIG_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
# parts of a packed linear that change its function, and that only a format that owns them reads
_TELLING = ("pre_quant_scale", "input_scale", "weight_scale_2", "weight_g_idx")

_KINDS = (  # of the tensors of a packed linear, in all formats
    dict.fromkeys(("weight_packed", "qweight", "weight"), "codes")
    | dict.fromkeys(("weight_scale", "scales"), "scales")
    | dict.fromkeys(("weight_zero_point", "qzeros"), "zero points")
)


@dataclass(frozen=True, slots=True)
class WeightSource:
    """A checkpoint whose packed linears read like plain ones.

    Attributes:
        checkpoint: the directory.
        format: how its linears are packed; None for a plain checkpoint.
        schemes: {linear: scheme} of the packed ones.
        tensors: every tensor of the plain model, sorted by name, and how it is stored; None for a packed linear.
        config: what describes the packing, empty for a plain checkpoint; not always from config.json.
        dtype: safetensors dtype of most bytes of the plain floating-point tensors; None where there are none.
    """

    checkpoint: Checkpoint
    format: Format | None
    schemes: dict[str, Scheme]
    tensors: dict[str, TensorInfo | None]
    config: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None

    @classmethod
    def open(cls, path: Path) -> WeightSource:
        """Open a directory and read from its config how it is packed.

        The config is `quantization_config` of config.json, or else one of the files in which tools write it.

        Raises:
            CheckpointError: it cannot be read, or is packed in a way that no format here reads.
        """
        checkpoint = Checkpoint.open(path)
        stored = checkpoint.tensors
        config = _packing_config(checkpoint)
        if not config:
            return cls(checkpoint, None, {}, dict(stored), {}, _main_dtype(stored.values()))
        fmt = _format_of(path, config)
        scheme_of = fmt.scheme_of(config)
        packed = _packed_linears(fmt, stored)
        schemes = {name: _required(scheme_of(name), name) for name in packed}
        owned = {f"{name}.{suffix}" for name in packed for suffix in fmt.suffixes}
        plain = {name: info for name, info in stored.items() if name not in owned and cache_scale_owner(name) is None}
        _require_single(path, packed, plain)
        names = sorted([*plain, *(f"{name}.weight" for name in packed)])
        tensors = {name: plain.get(name) for name in names}
        return cls(checkpoint, fmt, schemes, tensors, config, _main_dtype(plain.values()))

    def shape(self, linear: str) -> tuple[int, int]:
        """[N, K] of a packed linear, from headers alone: the one shape that its format stores like this.

        Raises:
            CheckpointError: no shape is stored like this with its scheme.
        """
        assert self.format is not None
        fmt, scheme, stored = self.format, self.schemes[linear], self.checkpoint.tensors
        marker = f"{linear}.{fmt.suffixes[0]}"
        sides = stored[marker].shape
        per_element = 32 // scheme.bits  # codes in a word; two in a byte
        for rows, columns in _shapes(sides, per_element) if len(sides) == 2 else ():
            if not scheme.fits(columns):
                continue
            specs = fmt.specs(linear, scheme, (rows, columns), fmt.scale_dtypes[0])
            if all(name not in stored or stored[name].shape == shape for name, (_, shape) in specs.items()):
                return rows, columns
        raise CheckpointError(f"`{marker}` is {list(sides)} and does not fit its other parts, or {scheme}", DAMAGED)

    def scale_dtype(self, linear: str) -> str:
        """Safetensors dtype of the scales of a packed linear."""
        assert self.format is not None
        return self.checkpoint.info(f"{linear}.{self.format.suffixes[1]}").dtype

    def cache_scales(self) -> dict[str, CacheScales]:
        """Read the scales of an FP8 KV cache: {attention module: scales}, empty where there are none.

        Raises:
            CheckpointError: a module has only one of the two, or one is not a single positive finite number.
        """
        found: dict[str, dict[str, float]] = {}
        for name in self.checkpoint.tensors if self.format else ():
            if owner := cache_scale_owner(name):
                found.setdefault(owner[0], {})[owner[1]] = self._cache_scale(name)
        for attention, scales in found.items():
            if missing := {"k", "v"} - scales.keys():
                raise CheckpointError(
                    f"`{attention}` has no scale for {missing.pop().upper()} of its KV cache", DAMAGED
                )
        return {attention: CacheScales(scales["k"], scales["v"]) for attention, scales in found.items()}

    def bytes_by_kind(self) -> dict[str, int]:
        """Stored bytes of packed codes, scales, zero points and everything else."""
        kinds = {"codes": 0, "scales": 0, "zero points": 0, "other": 0}
        for name, info in self.checkpoint.tensors.items():
            linear, _, leaf = name.rpartition(".")
            kinds[_KINDS.get(leaf, "other") if linear in self.schemes else "other"] += info.nbytes
        return kinds

    def quantized(self, linear: str) -> QuantizedWeight:
        """Read one packed linear."""
        return self._unpacked(linear, self.checkpoint.read(self._parts(linear)))

    def outline(self, linear: str) -> QuantizedWeight:
        """Read one packed linear but for its codes, which are on the meta device: a small part of what is stored.

        Everything that `quantized` refuses is refused here.
        """
        import torch

        from quantkit.checkpoint.dtypes import TORCH_DTYPES

        codes, *others = self._parts(linear)
        info = self.checkpoint.info(codes)
        absent = torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device="meta")
        return self._unpacked(linear, {codes: absent} | self.checkpoint.read(others))

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
            dtype: of floating-point results; None keeps what is stored, and gives packed linears that of `self.dtype`.
        """
        from quantkit.checkpoint.dtypes import TORCH_DTYPES
        from quantkit.ops.affine import dequantize

        plain = TORCH_DTYPES[self.dtype] if self.dtype else None
        found = {}
        for name in names:
            linear = name.removesuffix(".weight")
            if linear in self.schemes and linear != name:
                q = self.quantized(linear)
                found[name] = dequantize(q, dtype or plain or q.scale.dtype)
            else:
                tensor = self.checkpoint.read([name])[name]
                found[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        return found

    def _parts(self, linear: str) -> list[str]:
        """Names of the stored tensors of a packed linear, its codes first."""
        assert self.format is not None
        names = (f"{linear}.{suffix}" for suffix in self.format.suffixes)
        return [name for name in names if name in self.checkpoint.tensors]

    def _unpacked(self, linear: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        assert self.format is not None
        try:
            return self.format.unpack(linear, tensors, self.schemes[linear])
        except CheckpointError as error:
            raise CheckpointError(error.message, error.hint or DAMAGED) from None

    def _cache_scale(self, name: str) -> float:
        info = self.checkpoint.tensors[name]
        if math.prod(info.shape) != 1:
            raise CheckpointError(
                f"`{name}` is {list(info.shape)}, and only one scale for all heads is read", "calibrate the cache again"
            )
        value = float(self.checkpoint.read([name])[name])
        if not 0 < value < math.inf:
            raise CheckpointError(f"`{name}` is {value}, which is no scale", DAMAGED)
        return value


def _packing_config(checkpoint: Checkpoint) -> Any:
    """What describes the packing, with its `quant_method`; empty where nothing does."""
    if config := next(filter(None, map(checkpoint.config.get, CONFIG_KEYS)), None):
        return config
    for file, method in CONFIG_FILES.items():
        if (checkpoint.path / file).is_file():
            return {"quant_method": method} | read_json_object(checkpoint.path / file)
    return {}


def _format_of(path: Path, config: Any) -> Format:
    fmt = reader_of(config) if isinstance(config, dict) else None
    if fmt is None:
        method = config.get("quant_method") if isinstance(config, dict) else config
        raise CheckpointError(
            f"`{path}` is quantized as `{method}`, which is not read here", f"formats that are: {', '.join(FORMATS)}"
        )
    return fmt


def _packed_linears(fmt: Format, stored: Mapping[str, TensorInfo]) -> list[str]:
    """The linears that hold the codes of a format; where plain ones have a tensor of that name, their scales tell."""
    marker, scale = fmt.suffixes[:2]
    named = (name.removesuffix(f".{marker}") for name in stored if name.endswith(f".{marker}"))
    return [name for name in named if marker != "weight" or f"{name}.{scale}" in stored]


def _require_single(path: Path, packed: Iterable[str], plain: Mapping[str, TensorInfo]) -> None:
    """Raise CheckpointError where a packed linear is there plain, too, or with a part that its format does not read."""
    for name in packed:
        if f"{name}.weight" in plain:
            raise CheckpointError(f"`{name}` is in `{path}` both packed and as `{name}.weight`", DAMAGED)
        if part := next((part for part in _TELLING if f"{name}.{part}" in plain), None):
            raise CheckpointError(
                f"`{name}.{part}` changes what the linear computes, and is not read here",
                "start from the 16-bit checkpoint",
            )


def _shapes(sides: tuple[int, ...], per_element: int) -> tuple[tuple[int, int], ...]:
    """[N, K] of every way in which formats store codes as a matrix: words along K or along N, or bytes along N."""
    first, second = sides
    return (
        (first, second * per_element),
        (second, first * per_element),
        (second * per_element, first),
        (first * 2, second),
    )


def _main_dtype(infos: Iterable[TensorInfo]) -> str | None:
    """The safetensors dtype of most bytes of the floating-point tensors."""
    sizes: dict[str, int] = {}
    for info in infos:
        if info.dtype in ("F16", "BF16", "F32"):
            sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None


def _required(scheme: Scheme | None, name: str) -> Scheme:
    if scheme is None:
        raise CheckpointError(
            f"`{name}` is packed, but `quantization_config` gives it no scheme",
            "the config does not belong to the weights",
        )
    return scheme
