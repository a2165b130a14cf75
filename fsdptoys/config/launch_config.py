"""Settings of the launcher: device, ranks, nodes, timeouts and restarts."""

from dataclasses import dataclass, field
from enum import Enum

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import MOST_RANKS, MOST_SECONDS, above, at_least, check_bounds


class DeviceChoice(Enum):
    """Hardware to run on."""

    auto = "auto"
    """CUDA if available, else NPU, else CPU."""
    cuda = "cuda"
    npu = "npu"
    cpu = "cpu"


@dataclass
class LaunchConfig:
    """Processes and nodes; under torchrun its own arguments apply instead."""

    device: DeviceChoice = DeviceChoice.auto
    """Hardware to run on."""
    nproc_per_node: int = field(default=-1, metadata=at_least(1, MOST_RANKS, other=-1))
    """Ranks on this node; -1 for one per device (two on a CPU)."""
    nnodes: int = field(default=1, metadata=at_least(1, MOST_RANKS))
    """Number of nodes; run the same command on each of them."""
    rdzv_endpoint: str | None = None
    """host:port of the first node for the rendezvous; required for more than one node."""
    rdzv_token_file: str | None = None
    """File of mode 0600 with a secret shared by all nodes; unused on one node."""
    timeout_seconds: float = field(default=600.0, metadata=above(0, MOST_SECONDS))
    """Timeout in seconds of collectives, and of the arrival of all nodes at the start; a longer wait ends the run."""
    max_restarts: int = field(default=0, metadata=at_least(0, 10**6))
    """Maximum number of restarts of all workers from the newest checkpoint, after one was lost or failed."""

    def __post_init__(self) -> None:
        check_bounds("launch", self)
        if self.nnodes > 1 and not self.rdzv_endpoint:
            raise ConfigError(
                f"launch.nnodes={self.nnodes} needs a rendezvous; set launch.rdzv_endpoint=HOST:29400 to the "
                "first node's name"
            )
