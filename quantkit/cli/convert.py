"""`quantkit convert`."""

from __future__ import annotations


def convert() -> int:
    """Not there yet."""
    raise NotImplementedError
