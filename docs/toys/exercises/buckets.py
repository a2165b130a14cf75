"""Exercise 2, with ``fsdptoys/toys/buckets.py``: which gradients travel together?

The backward makes the last parameter's gradient first. A bucket that waits for gradients of both
ends of the model can leave only when the backward is over; many small ones cost a message each.
"""


def fill_buckets(sizes: list[int], cap: int) -> list[list[int]]:
    """Put parameters into buckets, so that each bucket is complete as early as possible.

    Args:
        sizes: bytes of each parameter, in the order of the forward.
        cap: a bucket is closed by the parameter with which it reaches so many bytes.

    Returns:
        Numbers of parameters, bucket by bucket, in the order in which the backward completes them.
    """
    raise NotImplementedError
