"""Seeds of random numbers that are the same in every process."""

import hashlib


def seed_of(*parts: object) -> int:
    """Return a 63-bit seed from any printable parts."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
