"""What a strategy's collectives do with gradients: sum them over ranks, or average them.

A trainer wants the sum: its loss is divided by the valid tokens of the global batch. So it
multiplies the loss by the divisor of the strategy's reduction, which is exact for powers of two.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sum:
    """Gradients are added up."""

    @property
    def divisor(self) -> int:
        """Return what divides a reduced gradient."""
        return 1


@dataclass(frozen=True)
class Mean:
    """Gradients are added up and divided by a number of ranks."""

    over: int

    @property
    def divisor(self) -> int:
        """Return what divides a reduced gradient."""
        return self.over


Reduction = Sum | Mean
