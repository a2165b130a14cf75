"""Exercise 5, before ``fsdptoys/toys/partition.py``: a partition table.

ZeRO-3 with whole tensors: each has one owner. Balancing them perfectly is hard (it is the partition
problem), but to be within 4/3 of the best is not. Handing them out in turn is not enough.
"""


def assign_owners(sizes: list[int], ranks: int) -> list[int]:
    """Choose an owner for every tensor.

    Args:
        sizes: bytes of each.
        ranks: how many there are.

    Returns:
        The owner's rank of each tensor. The fullest rank has at most 4/3 − 1/(3·ranks) of its bytes
        in the best table (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969).
    """
    raise NotImplementedError
