"""Stochastic rounding from float32 to bfloat16, so that updates below half a unit in the last place are not lost.

A bfloat16 is the upper half of a float32: a uniform 16-bit number is added to the lower half, which is then cut off. A
value is rounded up with a probability equal to its distance from the lower neighbor, so the mean is exact
(arXiv:2010.06192). Infinities and NaNs are kept.
"""

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**22
"""Elements rounded at a time; each takes 12 bytes of scratch: 48 MiB."""


@torch.no_grad()
def round_stochastically(target: Tensor, source: Tensor, generator: torch.Generator) -> None:
    """Round ``source``, flat float32, into ``target``, flat bfloat16 of the same length and device."""
    for into, values in zip(target.split(CHUNK_ELEMENTS), source.split(CHUNK_ELEMENTS), strict=True):
        bits = values.view(torch.int32)
        noise = torch.randint(0, 2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
        rounded = noise.add_(bits).bitwise_and_(-(2**16)).view(torch.float32)
        into.copy_(torch.where(values.isfinite(), rounded, values))
