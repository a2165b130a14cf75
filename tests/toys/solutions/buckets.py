"""From the last parameter to the first."""


def fill_buckets(sizes: list[int], cap: int) -> list[list[int]]:
    """Close a bucket when it is full."""
    buckets: list[list[int]] = []
    room = 0
    for number in reversed(range(len(sizes))):
        if room <= 0:
            buckets.append([])
            room = cap
        buckets[-1].append(number)
        room -= sizes[number]
    return buckets
