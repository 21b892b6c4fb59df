"""What the formats share: shapes they refuse, checks of stored tensors and of JSON fields, names said shortly.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quantkit.errors import CheckpointError, UnsupportedScheme
from quantkit.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

    from quantkit.qweight import QuantizedWeight

REQUANTIZE = "requantize it from the 16-bit checkpoint"
KEEP = "keep this linear in 16 bit with `--ignore`"
_TORCH_NAMES = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
}


def words(count: int, bits: int) -> int:
    """Count the 32-bit words that hold `count` codes; the twin of `ops.pack.words`, so that planning needs no torch."""
    return -(-count * bits // 32)


def groups_of(scheme: Scheme, columns: int) -> int:
    """Count the groups in a row of `columns` input features."""
    return columns // scheme.group(columns)


def require_groups(scheme: Scheme, columns: int) -> None:
    """Raise UnsupportedScheme where groups do not tile a row of `columns` input features."""
    if not scheme.fits(columns):
        usual = next((f"pass `--group-size {size}`, or " for size in (128, 64, 32) if columns % size == 0), "")
        raise UnsupportedScheme(
            f"{columns:,} input features are not a multiple of group size {scheme.group_size}",
            f"{usual}choose with `--indivisible` what happens to such linears",
        )


def require_multiple(count: int, of: int, what: str, why: str) -> None:
    """Raise UnsupportedScheme where a side of the weight is no multiple of what the layout packs together.

    Args:
        what: "input" or "output".
        why: what `of` is, for the message.
    """
    if count % of:
        raise UnsupportedScheme(f"{count:,} {what} features are not a multiple of {of}, {why}", KEEP)


def require_packable(name: str, q: QuantizedWeight, scale_dtypes: Sequence[str], index_hint: str = "") -> None:
    """Refuse what no layout here is written with.

    Raises:
        UnsupportedScheme: groups are not consecutive.
        ValueError: the scale has a dtype that the layout has no place for, or a symmetric weight a zero point that is
            not in the middle.
    """
    if q.g_idx is not None:
        raise UnsupportedScheme(f"`{name}` has a group index, which engines no longer load", index_hint)
    if not _has_dtype(q.scale, scale_dtypes):
        raise ValueError(f"the scales of `{name}` are {_kind(q.scale)}, and must be one of {', '.join(scale_dtypes)}")
    if q.scheme.symmetric and bool((q.zero_point != q.scheme.midpoint).any()):
        raise ValueError(f"`{name}` is symmetric with a zero point other than {q.scheme.midpoint}")


def require_scale_dtype(scale_dtype: str, allowed: Sequence[str]) -> None:
    """Raise ValueError where a layout has no place for scales of a safetensors dtype."""
    if scale_dtype not in allowed:
        raise ValueError(f"scale_dtype is {scale_dtype!r}, and must be one of {', '.join(allowed)}")


def stored(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """Look a tensor up by its full name; raises CheckpointError where it is missing."""
    try:
        return tensors[name]
    except KeyError:
        raise CheckpointError(f"`{name}` is missing") from None


def expect(name: str, tensor: Tensor, dtypes: Sequence[str], shape: tuple[int, ...]) -> Tensor:
    """Return the tensor; raises CheckpointError naming it where dtype or shape is another."""
    if tuple(tensor.shape) != shape or not _has_dtype(tensor, dtypes):
        wanted = " or ".join(_TORCH_NAMES[each] for each in dtypes)
        raise CheckpointError(f"`{name}` is {_kind(tensor)}, and the scheme asks for {wanted} {list(shape)}")
    return tensor


def require_matrix(name: str, tensor: Tensor) -> tuple[int, int]:
    """Return rows and columns; raises CheckpointError naming a tensor that is no matrix."""
    if tensor.dim() != 2 or not tensor.numel():
        raise CheckpointError(f"`{name}` is {_kind(tensor)}, not a matrix")
    return tensor.shape[0], tensor.shape[1]


def require_shape(name: str, found: tuple[int, int], scheme: Scheme, expected: tuple[int, int] | None) -> None:
    """Raise CheckpointError where a stored weight [N, K] is not the model's, or its groups do not tile K."""
    if expected is not None and found != tuple(expected):
        raise CheckpointError(f"`{name}` holds {list(found)}, and the model has {list(expected)}")
    if not scheme.fits(found[1]):
        raise CheckpointError(f"`{name}` has {found[1]:,} input features, no multiple of {scheme.group_size}")


def require_middle(name: str, zero_point: Tensor, scheme: Scheme) -> None:
    """Raise CheckpointError where a symmetric weight has a zero point that is not in the middle."""
    if scheme.symmetric and bool((zero_point != scheme.midpoint).any()):
        raise CheckpointError(
            f"`{name}` holds zero points other than {scheme.midpoint}, though the config says symmetric",
            "the config does not belong to the weights",
        )


def typed(config: Mapping[str, Any], key: str, kind: type) -> Any:
    """The value of a key of `quantization_config`, empty where it is missing or null."""
    value = config.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise CheckpointError(f"quantization_config: `{key}` is {value!a:.80}, not a {kind.__name__}", REQUANTIZE)
    return value


def names_in(config: Mapping[str, Any], key: str) -> list[str]:
    """A list of names, empty where it is missing or null."""
    names: list[str] = typed(config, key, list)
    if odd := [name for name in names if not isinstance(name, str)]:
        raise CheckpointError(f"quantization_config: `{key}` holds {odd[0]!a:.80}, which is no name", REQUANTIZE)
    return names


def read_scheme(where: str, bits: Any, group_size: Any, symmetric: Any) -> Scheme:
    """Make a scheme of JSON values; raises CheckpointError saying `where` they make none."""
    for key, value, kind in (("bits", bits, int), ("group_size", group_size, int), ("symmetry", symmetric, bool)):
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"{where}: `{key}` is {value!a:.80}, not {'a number' if kind is int else 'a flag'}")
    try:
        return Scheme(bits, group_size, symmetric)
    except UnsupportedScheme as problem:
        raise CheckpointError(f"{where}: {problem.message}", REQUANTIZE) from None


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression of a config."""
    try:
        return re.compile(pattern)
    except re.error as problem:
        raise CheckpointError(f"quantization_config: `{pattern}` is not a regular expression: {problem}") from None


def is_head(name: str) -> bool:
    """Whether a linear is the output head by its name."""
    return name.rpartition(".")[2] == "lm_head"


def kept(schemes: Mapping[str, Scheme | None]) -> list[str]:
    """Names of the linears that stay in 16 bit, the output head always among them."""
    names = [name for name, scheme in schemes.items() if scheme is None]
    # compat: a tied head has no tensor of its own, yet it is a Linear that engines would take for a packed one
    return names if any(is_head(name) for name in schemes) else [*names, "lm_head"]


def only_scheme(fmt: str, schemes: Mapping[str, Scheme | None]) -> Scheme:
    """The scheme of all packed linears; raises UnsupportedScheme where there is none, or more than one."""
    found = list(dict.fromkeys(scheme for scheme in schemes.values() if scheme is not None))
    if not found:
        raise UnsupportedScheme(f"no linear is packed, and `{fmt}` describes nothing else")
    if len(found) > 1:
        raise UnsupportedScheme(
            f"`{fmt}` has one scheme for all linears, and these have {len(found)}: {'; '.join(map(str, found[:3]))}",
            "use `--format compressed-tensors`, or drop the overrides",
        )
    return found[0]


def holds_any(parts: Iterable[str]) -> Callable[[str], bool]:
    """Make the test whether a name has one of `parts` anywhere inside, as some readers match names."""
    # by length, so that a mixture of experts with tens of thousands of names takes no time for each of them
    by_length: dict[int, set[str]] = {}
    for part in parts:
        by_length.setdefault(len(part), set()).add(part)

    def holds(name: str) -> bool:
        return any(
            name[start : start + length] in group
            for length, group in by_length.items()
            for start in range(len(name) - length + 1)
        )

    return holds


def split_suffixes(names: Iterable[str], others: Collection[str]) -> dict[str, bool]:
    """Say names as shortly as none of `others` is said too.

    Returns:
        {suffix: True}, for every name that ends in a dot and this suffix, or {full name: False}.
    """
    taken = {suffix for name in others for suffix in _suffixes(name)}
    found: dict[str, bool] = {}
    for name in names:
        suffix = next((suffix for suffix in _suffixes(name) if suffix not in taken), None)
        found[suffix or name] = suffix is not None
    return found


def _suffixes(name: str) -> list[str]:
    """Proper dotted suffixes up to the first number from the right: `down_proj`, `mlp.down_proj`."""
    parts = name.split(".")
    found: list[str] = []
    for index in range(len(parts) - 1, 0, -1):
        if parts[index].isdigit():
            break
        found.append(".".join(parts[index:]))
    return found


def _has_dtype(tensor: Tensor, dtypes: Sequence[str]) -> bool:
    return str(tensor.dtype).removeprefix("torch.") in {_TORCH_NAMES[each] for each in dtypes}


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
