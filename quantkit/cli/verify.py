"""`quantkit verify`."""

from __future__ import annotations


def verify() -> int:
    """Not there yet."""
    raise NotImplementedError
