"""`quantkit check`."""

from __future__ import annotations


def check() -> int:
    """Not there yet."""
    raise NotImplementedError
