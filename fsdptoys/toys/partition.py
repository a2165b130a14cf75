"""Who owns which tensor, when tensors are not cut: a partition table that balances bytes.

Cutting every tensor evenly (:mod:`.slices`) balances to the byte, but a slice knows nothing of rows and columns. Whole
tensors suit any optimizer, also one that looks at matrices, and the price is balance: no rank can hold less than the
largest tensor. Taking the largest first, each to the rank with the least so far, keeps the fullest rank within the mean
plus the largest tensor; mostly it is far closer.

What is to be even is a choice:

- ``model``: the bytes that each rank keeps, over all units. The aim is memory.
- ``unit``: the bytes of each unit by itself, so that its broadcasts come from as many ranks as possible. The aim is
  the time of each gather; over the model bytes may be less even.
"""

from collections.abc import Sequence
from enum import Enum


class Evenness(Enum):
    """What is balanced over the ranks."""

    model = "model"
    unit = "unit"


def assign_owners(units: Sequence[Sequence[int]], ranks: int, evenness: Evenness = Evenness.model) -> list[list[int]]:
    """Choose an owner for every tensor.

    Args:
        units: bytes of each tensor, unit by unit.
        ranks: how many there are.
        evenness: what is balanced.

    Returns:
        The owner's rank of each tensor, unit by unit.
    """
    owners = [[0] * len(unit) for unit in units]
    kept = [0] * ranks
    places = [(number, slot) for number, unit in enumerate(units) for slot in range(len(unit))]
    if evenness is Evenness.model:
        groups = [places]
    else:
        groups = [[place for place in places if place[0] == number] for number in range(len(units))]
    for group in groups:
        in_group = [0] * ranks
        for number, slot in sorted(group, key=lambda place: -units[place[0]][place[1]]):
            owner = min(range(ranks), key=lambda rank: (in_group[rank], kept[rank]))
            owners[number][slot] = owner
            in_group[owner] += units[number][slot]
            kept[owner] += units[number][slot]
    return owners
