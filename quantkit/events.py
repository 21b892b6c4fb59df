"""What a long run reports while it works. The library emits these; the CLI draws them. Values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """Work on one block entered a stage: read, observe, rescale, round, advance, write."""

    block: int
    blocks: int
    stage: str


@dataclass(frozen=True, slots=True)
class BlockDone:
    """One block is on disk.

    Attributes:
        errors: relative output error tr(E H Eᵀ) / tr(W H Wᵀ) per linear, by full name.
        seconds: wall time of this block.
        rss: resident memory of the process now, bytes.
    """

    block: int
    blocks: int
    errors: dict[str, float]
    seconds: float
    rss: int


@dataclass(frozen=True, slots=True)
class Fallback:
    """Something was done in another way than asked; `--strict` fails on it."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something a user should know that changes nothing about the result."""

    message: str


Event = Stage | BlockDone | Fallback | Note
Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Drop an event."""
