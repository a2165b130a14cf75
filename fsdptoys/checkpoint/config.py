"""Settings of what a run leaves behind of its model."""

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    """What is kept of the model."""

    final_weights: bool = False
    """At the end of the run write the trained weights into the run directory; ``fsdptoys convert to-hf`` reads them."""
