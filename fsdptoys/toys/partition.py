"""Partition table of whole tensors: which rank owns which, balanced in bytes.

Cutting every tensor (:mod:`.flat_slices`) balances to the byte, but a slice has no rows and
columns. Whole tensors suit any optimizer, also one that works on matrices, at the price of balance:
no rank holds less than the largest tensor. Assigning the largest first, each to the rank with the
least so far, keeps the fullest rank within the mean plus the largest tensor, and usually far
closer.
"""

from collections.abc import Sequence
from enum import Enum


class Evenness(Enum):
    """Bytes to balance over the ranks."""

    model = "model"
    """Bytes of the model: the least memory."""
    unit = "unit"
    """Bytes of each unit, so that its broadcasts come from as many ranks as possible: the fastest
    gathers."""


def assign_owners(
    units: Sequence[Sequence[int]], ranks: int, evenness: Evenness = Evenness.model
) -> list[list[int]]:
    """Choose an owner for every tensor.

    Args:
        units: bytes of each tensor, unit by unit.
        ranks: number of ranks.
        evenness: balance over the model or in each unit.

    Returns:
        The owner's rank of each tensor, unit by unit.
    """
    owners = [[0] * len(unit) for unit in units]
    rank_bytes = [0] * ranks
    slots = [(number, slot) for number, unit in enumerate(units) for slot in range(len(unit))]
    if evenness is Evenness.model:
        groups = [slots]
    else:
        groups = [[pair for pair in slots if pair[0] == number] for number in range(len(units))]
    for group in groups:
        in_group = [0] * ranks
        for number, slot in sorted(group, key=lambda pair: -units[pair[0]][pair[1]]):
            owner = min(range(ranks), key=lambda rank: (in_group[rank], rank_bytes[rank]))
            owners[number][slot] = owner
            in_group[owner] += units[number][slot]
            rank_bytes[owner] += units[number][slot]
    return owners
