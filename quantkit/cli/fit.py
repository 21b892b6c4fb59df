"""`quantkit fit`."""

from __future__ import annotations


def fit() -> int:
    """Not there yet."""
    raise NotImplementedError
