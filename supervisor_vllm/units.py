"""Bytes as people read them."""

from __future__ import annotations


def gib(size_bytes: float) -> str:
    """`12.34 GiB`; below a GiB in MiB."""
    if abs(size_bytes) < 2**30:
        return f"{size_bytes / 2**20:.0f} MiB"
    return f"{size_bytes / 2**30:.2f} GiB"
