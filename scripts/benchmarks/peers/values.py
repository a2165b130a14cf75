"""Initial values that are the same in every program: drawn on the device from a seed that the
tensor's name gives.

Needs torch alone, so that it runs in the peers' own environment.
"""

import zlib

import torch
from torch import Tensor

INIT_STD = 0.02


@torch.no_grad()
def draw(param: Tensor, name: str) -> None:
    """Fill a whole parameter: ones for norms, N(0, 0.02²) for matrices, drawn in float32 and
    rounded to its dtype.

    Args:
        param: the parameter.
        name: of its tensor in Hugging Face's format, which every program knows.
    """
    if param.ndim == 1:
        param.fill_(1.0)
        return
    generator = torch.Generator(param.device).manual_seed(zlib.crc32(name.encode()))
    param.copy_(
        torch.empty(param.shape, device=param.device).normal_(
            0.0, INIT_STD, generator=generator
        )
    )
