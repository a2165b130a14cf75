"""Inputs of a step model."""

from dataclasses import dataclass

from fsdptoys.config.schema import Config
from fsdptoys.models import DecoderModel
from fsdptoys.parallel.precision import DType

from .activations import Segments
from .units import Units


@dataclass(frozen=True)
class StepSetup:
    """A configuration with its model's measured segments and units."""

    config: Config
    world_size: int
    model: DecoderModel
    segments: Segments
    units: Units
    shard_ranks: int
    """Ranks that share one copy of the parameters."""

    @property
    def compute_bytes(self) -> int:
        """Bytes of a parameter in forward and backward."""
        return 4 if self.config.parallel.param_dtype is DType.float32 else 2

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a gradient element during its reduction."""
        dtype = getattr(self.config.parallel, "reduce_dtype", None)
        return dtype.torch.itemsize if dtype is not None else 4

    @property
    def replicas(self) -> int:
        """Copies of the parameters."""
        return self.world_size // self.shard_ranks
