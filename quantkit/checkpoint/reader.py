"""A checkpoint directory, validated when it is opened and read tensor by tensor.

Plain reads into the tensor's own buffer, no memory map: the pages of a map count as resident memory and
stay there, so a run would appear to grow by the size of the model. Only reading a tensor imports torch.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from quantkit.checkpoint.header import TensorInfo, parse_json_object
from quantkit.checkpoint.locate import read_headers, read_small, require_directory
from quantkit.checkpoint.sizes import is_floating
from quantkit.errors import CheckpointError, ResourceError

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE = "config.json"
CHUNK_BYTES = 16 * 2**20
QUANTIZABLE_DTYPES = ("F16", "BF16", "F32")
_PACKED_PARTS = (
    *("qweight", "qzeros", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_zero_point"),
    *("weight_global_scale", "SCB", "absmax", "quant_map", "nested_absmax"),
)
_PACKED_SUFFIXES = ("_proj_blocks", "_proj_scales")  # MXFP4 experts
_INTEGERS = ("I8", "U8", "I32", "U32")
_CHECK_ELEMENTS = 2**22  # elements of a chunk that is widened to be checked: 32 MiB in float64


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A validated checkpoint directory. Holds no weights and no open files.

    Attributes:
        config: the content of config.json. Not to be modified.
        tensors: every tensor, sorted by name.
        files: the weight files, sorted, relative to `path`.
        fingerprint: what `digest` returns.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    files: tuple[str, ...]
    fingerprint: str

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Validate a directory: its config, its index, and the header and size of every weight file.

        Raises:
            CheckpointError: naming the file and, where there is one, the tensor.
        """
        path = Path(path)
        require_directory(path)
        headers = read_headers(path)
        raw_config = read_small(path / CONFIG_FILE)
        config = parse_json_object(raw_config, CONFIG_FILE)
        digest = hashlib.sha256(hashlib.sha256(raw_config).digest())
        for header in headers:
            digest.update(f"{header.file}\0{header.size}\0{header.sha256}\n".encode())
        tensors = sorted((info for header in headers for info in header.tensors), key=lambda info: info.name)
        if not tensors:
            raise CheckpointError(f"`{path}` has weight files without a tensor", "download the model again")
        files = tuple(header.file for header in headers)
        return cls(path, config, {info.name: info for info in tensors}, files, digest.hexdigest())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(info.nbytes for info in self.tensors.values())

    def digest(self) -> str:
        """Return a sha256 over config.json, all headers and all file sizes, but not over the data: it is cheap."""
        return self.fingerprint

    def info(self, name: str) -> TensorInfo:
        """Return where a tensor lies. Raises CheckpointError for a name that the checkpoint lacks."""
        if name not in self.tensors:
            close = difflib.get_close_matches(name, self.tensors, n=1)
            hint = f"did you mean `{close[0]}`?" if close else "list the tensors with `quantkit inspect`"
            raise CheckpointError(f"`{self.path}` has no tensor `{name}`", hint)
        return self.tensors[name]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors as they are stored, on the CPU, each into memory of its own.

        Raises:
            CheckpointError: an unknown name, or a file that changed or cannot be read.
            ResourceError: a tensor that does not fit into memory.
        """
        infos = [self.info(name) for name in dict.fromkeys(names)]
        tensors: dict[str, Tensor] = {}
        for file in sorted({info.file for info in infos}):
            with self._stream(file) as stream:
                for info in sorted((info for info in infos if info.file == file), key=lambda info: info.start):
                    tensors[info.name] = _read_tensor(stream, info)
        return {info.name: tensors[info.name] for info in infos}

    def raw_chunks(self, name: str, chunk: int = CHUNK_BYTES) -> Iterator[bytearray]:
        """Yield the stored bytes of a tensor, at most `chunk` at a time, each in a buffer of its own.

        Raises:
            CheckpointError: an unknown name, or a file that changed or cannot be read.
        """
        info = self.info(name)
        with self._stream(info.file) as stream:
            for at in range(info.start, info.end, chunk):
                buffer = bytearray(min(chunk, info.end - at))
                _fill(stream, at, memoryview(buffer), info)
                yield buffer

    def _stream(self, file: str) -> BinaryIO:
        try:
            # unbuffered: reads go straight into the buffer that is handed over
            return open(self.path / file, "rb", buffering=0)
        except OSError as error:
            raise CheckpointError(
                f"`{file}` cannot be read any more: {error.strerror}", "leave the source alone during a run"
            ) from error


def _read_tensor(stream: BinaryIO, info: TensorInfo) -> Tensor:
    import torch

    from quantkit.checkpoint.dtypes import TORCH_DTYPES

    if info.dtype not in TORCH_DTYPES:
        raise CheckpointError(f"`{info.name}` is {info.dtype}, which torch {torch.__version__} lacks", "update torch")
    try:
        data = torch.empty(info.nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise ResourceError(
            f"no memory for `{info.name}`, {info.nbytes / 2**30:.1f} GiB", "free memory or use a larger machine"
        ) from error
    _fill(stream, info.start, data.numpy().data, info)
    return data.view(TORCH_DTYPES[info.dtype]).reshape(info.shape)


def _fill(stream: BinaryIO, start: int, buffer: memoryview, info: TensorInfo) -> None:
    """Read len(buffer) bytes from `start` on."""
    done = 0
    try:
        stream.seek(start)
        while done < len(buffer):
            count = stream.readinto(buffer[done:])  # type: ignore[attr-defined]  # at most 2 GiB at a time on Linux
            if not count:
                break
            done += count
    except OSError as error:
        raise CheckpointError(
            f"`{info.name}` in `{info.file}` cannot be read: {error.strerror}", "check the disk"
        ) from error
    if done < len(buffer):
        raise CheckpointError(
            f"`{info.file}` became shorter while it was read: `{info.name}` lacks {len(buffer) - done:,} bytes",
            "leave the source alone during a run",
        )


def check_finite(name: str, tensor: Tensor, file: str = "") -> None:
    """Raise CheckpointError when a floating-point tensor holds NaN or inf; integers always pass.

    Args:
        file: where the tensor comes from, for the message.
    """
    if not (tensor.is_floating_point() and tensor.numel()) or _all_finite(tensor):
        return
    nan = inf = 0
    for part in tensor.detach().reshape(-1).split(_CHECK_ELEMENTS):
        nan += int(part.double().isnan().sum())
        inf += int(part.double().isinf().sum())
    where = f"`{name}` in `{file}`" if file else f"`{name}`"
    raise CheckpointError(f"{where} holds {nan:,} NaN and {inf:,} infinite values", "use an undamaged checkpoint")


def _all_finite(tensor: Tensor) -> bool:
    flat = tensor.detach().reshape(-1)
    # One pass without temporaries: extremes are finite exactly when everything is, since NaN propagates.
    # 8-bit floats have no such kernel and are widened a chunk at a time.
    parts = [flat] if tensor.element_size() > 1 else flat.split(_CHECK_ELEMENTS)
    for part in parts:
        low, high = (part if part.element_size() > 1 else part.float()).aminmax()
        if not (low.isfinite() and high.isfinite()):
            return False
    return True


def require_quantizable(ckpt: Checkpoint) -> None:
    """Raise CheckpointError unless the weights are plain F16, BF16 or F32 matrices, naming what was found."""
    hint = "start from the original 16-bit checkpoint"
    for where, config in _configs(ckpt.config):
        for key in ("quantization_config", "compression_config"):
            if config.get(key):
                method = config[key].get("quant_method", "") if isinstance(config[key], dict) else ""
                kind = f" ({method})" if method else ""
                raise CheckpointError(f"`{ckpt.path}` is quantized already: config.json has `{where}{key}`{kind}", hint)
    for info in ckpt.tensors.values():
        if _is_packed(info):
            shape = list(info.shape)
            raise CheckpointError(
                f"`{info.name}` in `{info.file}` is a packed weight: {info.dtype} {shape}; the model is quantized", hint
            )
    floats = [info for info in ckpt.tensors.values() if is_floating(info.dtype)]
    matrices = [info for info in floats if len(info.shape) >= 2]
    if not matrices:
        raise CheckpointError(f"`{ckpt.path}` holds no weight matrix of floating-point numbers", hint)
    for info in matrices:
        if info.dtype not in QUANTIZABLE_DTYPES:
            wanted = ", ".join(QUANTIZABLE_DTYPES)
            raise CheckpointError(f"`{info.name}` in `{info.file}` is {info.dtype}, not one of {wanted}", hint)


def _configs(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the config and its sub-configs (text, vision, ...) with the prefix that names them."""
    yield "", config
    for key, value in config.items():
        if key.endswith("_config") and isinstance(value, dict):
            yield f"{key}.", value


def _is_packed(info: TensorInfo) -> bool:
    parts = info.name.split(".")
    if any(part in _PACKED_PARTS for part in parts[-2:]) or parts[-1].endswith(_PACKED_SUFFIXES):
        return True
    # An integer matrix is a weight unless it is a buffer, such as position_ids [1, T] or a causal mask [1, 1, T, T].
    is_matrix = len(info.shape) == 2 and min(info.shape) > 1
    return info.dtype in _INTEGERS and len(info.shape) >= 2 and ("weight" in parts[-1] or is_matrix)
