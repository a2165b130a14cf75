"""How far the bits of a run repeat: ``train.deterministic``."""

from enum import Enum


class Deterministic(Enum):
    """Which runs have the same bits; as a bool, whether kernels are deterministic and reductions in
    float64."""

    false = False
    """PyTorch's default kernels, and float32 reductions once a step."""
    true = True
    """Deterministic kernels, and a float64 reduction after each micro-batch: any layout of 1, 2, 4,
    8, … ranks."""
    layout = "layout"
    """Sums over tokens by ``grains``: any split of the global batch over ranks and
    micro-batches."""

    def __bool__(self) -> bool:
        return self is not Deterministic.false

    @property
    def covers_layouts(self) -> bool:
        """Whether the bits depend on the global batch alone."""
        return self is Deterministic.layout

    @property
    def uses_float64(self) -> bool:
        """Whether parameters are gathered, and gradients summed over a step and over ranks, in
        float64."""
        return self.covers_layouts

    @property
    def reduces_each_microbatch(self) -> bool:
        """Whether each micro-batch's gradients are reduced in float64 and rounded."""
        return self is Deterministic.true

    @property
    def word(self) -> str:
        """For messages."""
        return self.name
