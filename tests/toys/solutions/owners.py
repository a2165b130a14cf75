"""The largest first, to the rank with the least."""


def assign_owners(sizes: list[int], ranks: int) -> list[int]:
    """Graham's rule."""
    owners, loads = [0] * len(sizes), [0] * ranks
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owners[number] = min(range(ranks), key=loads.__getitem__)
        loads[owners[number]] += sizes[number]
    return owners
