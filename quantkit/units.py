"""Numbers with units, as people read them."""

from __future__ import annotations


def gigabytes(size: float) -> str:
    """Write bytes as 1.2 GB, or as MB below one."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
