"""Bytes in words."""

from fsdptoys.device import GIB

MIB, KIB = 2**20, 2**10


def in_words(count: int) -> str:
    """``count`` bytes in the largest binary unit that leaves something before the point."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"
