"""Stochastic rounding from float32 to bfloat16, so that updates below half a unit in the last place are not lost.

A bfloat16 is the upper half of a float32, so a uniform 16-bit number is added to the lower half and what is left of it
cut off: a value is rounded up with the probability that equals its distance from the lower neighbour, and is right on
average (arXiv:2010.06192). Infinities and NaNs stay what they are.
"""

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**22
"""Elements that are rounded at a time, since each needs 12 bytes of work space: 48 MiB."""


@torch.no_grad()
def round_stochastically(target: Tensor, source: Tensor, generator: torch.Generator) -> None:
    """Round ``source``, flat float32, into ``target``, flat bfloat16 of the same length and device."""
    for into, values in zip(target.split(CHUNK_ELEMENTS), source.split(CHUNK_ELEMENTS), strict=True):
        bits = values.view(torch.int32)
        noise = torch.randint(0, 2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
        rounded = noise.add_(bits).bitwise_and_(-(2**16)).view(torch.float32)
        into.copy_(torch.where(values.isfinite(), rounded, values))
