"""Exercise 3, before ZeRO-1: an optimizer step that the ranks share.

All ranks have the same parameter and the same gradient. AdamW's two averages are twice as large as
the parameter; if each rank keeps them for 1/N of the elements only, which rank updates which
elements, and which have to be sent afterwards?

First read ``adamw_update`` in ``fsdptoys/toys/optim.py``, the update of one tensor, which may be a
slice of another. It is given; the exercise is the sharding.
"""

from torch import Tensor


def sharded_adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    step: int,
    lr: float = 1e-2,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> None:
    """Update a parameter in place, on every rank alike, to the bits of ``torch.optim.AdamW``.

    Args:
        parameter: flat; its length need not be a multiple of the number of ranks.
        gradient: likewise, the same on all ranks.
        state: empty at the first step; whatever is left in it, at most two averages of ⌈length / N⌉
            elements, is there at the next.
        step: 1 at the first.
    """
    raise NotImplementedError
