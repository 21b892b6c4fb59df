"""What a quantized weight looks like: bits, group size, symmetry. Values only; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from quantkit.errors import UnsupportedScheme, UsageError

BITS = (4, 8)
PER_CHANNEL = -1


@dataclass(frozen=True, slots=True)
class Scheme:
    """Uniform integer quantization of a weight [out_features, in_features].

    Attributes:
        bits: width of a code, 4 or 8.
        group_size: consecutive input features that share a scale; -1 means one scale per output channel.
        symmetric: the zero point is fixed at 2^(bits-1); otherwise it is chosen per group.
    """

    bits: int = 4
    group_size: int = 128
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise UnsupportedScheme(f"{self.bits} bits are not supported", f"choose one of {', '.join(map(str, BITS))}")
        if self.group_size != PER_CHANNEL and self.group_size < 1:
            raise UnsupportedScheme(
                f"group size {self.group_size} is not a size",
                "use a positive divisor of in_features, or -1 per channel",
            )

    @property
    def qmax(self) -> int:
        """Largest code."""
        return 2**self.bits - 1

    @property
    def midpoint(self) -> int:
        """Zero point of a symmetric group."""
        return 2 ** (self.bits - 1)

    def fits(self, in_features: int) -> bool:
        """Whether the groups tile a row of `in_features` exactly."""
        return self.group_size == PER_CHANNEL or in_features % self.group_size == 0

    def group(self, in_features: int) -> int:
        """Input features per group for a row of `in_features`."""
        return in_features if self.group_size == PER_CHANNEL else self.group_size

    def __str__(self) -> str:
        group = "per channel" if self.group_size == PER_CHANNEL else f"group {self.group_size}"
        return f"{self.bits}-bit, {group}, {'symmetric' if self.symmetric else 'asymmetric'}"


def legal_groups(in_features: int, *, at_most: int = 256, at_least: int = 16) -> list[int]:
    """Group sizes that tile `in_features` and that engines commonly accept, largest first."""
    return [g for g in range(at_most, at_least - 1, -1) if in_features % g == 0 and g % 8 == 0]


@dataclass(frozen=True, slots=True)
class Override:
    """Scheme fields that differ for the linears whose names match `pattern`."""

    pattern: str
    changes: tuple[tuple[str, int | bool], ...]

    def apply(self, scheme: Scheme) -> Scheme:
        changes: dict[str, Any] = dict(self.changes)
        return replace(scheme, **changes)


def parse_override(text: str) -> Override:
    """Read `'PATTERN: bits=8,group_size=32,symmetric=false'`.

    Raises:
        UsageError: the text has another shape, names an unknown field or holds a value that is none.
    """
    shape = "write it as 'PATTERN: bits=8,group_size=32,symmetric=false'"
    # rpartition: a `re:` pattern has a colon of its own
    pattern, colon, body = text.rpartition(":")
    if not colon or not pattern.strip() or not body.strip():
        raise UsageError(f"override `{text}` has no pattern or no changes", shape)
    changes: list[tuple[str, int | bool]] = []
    for item in body.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in ("bits", "group_size", "symmetric"):
            raise UsageError(f"override `{text}` has an unknown field `{key}`", shape)
        changes.append((key, _flag(value, text) if key == "symmetric" else _integer(value, text)))
    override = Override(pattern.strip(), tuple(changes))
    override.apply(Scheme())  # the values must make a scheme
    return override


def _integer(value: str, text: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"override `{text}` holds `{value}` where a whole number belongs") from None


def _flag(value: str, text: str) -> bool:
    try:
        return {"true": True, "false": False}[value.lower()]
    except KeyError:
        raise UsageError(f"override `{text}` holds `{value}` where true or false belongs") from None
