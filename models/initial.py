"""Initial values, which a layer declares by the names of its parameters (``Layer.initial``)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .config import NativeConfig

Initial = Callable[[Tensor, torch.Generator, NativeConfig], None]
"""``initial(rows, generator, config)`` fills consecutive rows of a parameter, seen as a matrix, in
place."""


def ones(rows: Tensor, generator: torch.Generator, config: NativeConfig) -> None:
    """Start norms and scales without effect."""
    rows.fill_(1.0)


def zeros(rows: Tensor, generator: torch.Generator, config: NativeConfig) -> None:
    """Start biases without effect."""
    rows.zero_()


def normal(rows: Tensor, generator: torch.Generator, config: NativeConfig) -> None:
    """Draw from a normal distribution of the configured standard deviation."""
    rows.normal_(0.0, config.init_std, generator=generator)


def residual(rows: Tensor, generator: torch.Generator, config: NativeConfig) -> None:
    """Draw smaller values, for projections into the residual stream; it has 2·n_layers summands."""
    std = config.init_std / math.sqrt(2 * config.n_layers)
    rows.normal_(0.0, std, generator=generator)
