"""Settings of the launcher: device, ranks, nodes, timeouts and restarts."""

from dataclasses import dataclass
from enum import Enum

from fsdptoys.device import DEVICE_TYPES
from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import MOST_RANKS, MOST_SECONDS, above, at_least
from fsdptoys.utils.options import Effect, check_options, option


class DeviceChoice(Enum):
    """Hardware to run on."""

    auto = "auto"
    """This machine's accelerator if there is one, else its CPU."""
    _ignore_ = "device_type"
    for device_type in DEVICE_TYPES:
        locals()[device_type] = device_type


@dataclass
class LaunchConfig:
    """Processes and nodes; under torchrun its own arguments apply instead."""

    device: DeviceChoice = option(DeviceChoice.auto, effect=Effect.none)
    """Hardware to run on."""
    nproc_per_node: int = option(
        -1,
        at_least(1, MOST_RANKS, other=-1),
        effect=Effect.none,
        alias="nproc nprocs num_processes num_gpus n_gpus ngpus gpus devices gpus_per_node",
    )
    """Ranks on this node; -1 for one per device (two on a CPU)."""
    nnodes: int = option(
        1,
        at_least(1, MOST_RANKS),
        effect=Effect.none,
        alias="num_nodes nodes num_machines",
    )
    """Number of nodes; run the same command on each of them."""
    rdzv_endpoint: str | None = option(None, effect=Effect.none)
    """host:port of the first node for the rendezvous; required for more than one node."""
    rdzv_token_file: str | None = option(None, effect=Effect.none)
    """File of mode 0600 with a secret shared by all nodes; unused on one node."""
    timeout_seconds: float = option(600.0, above(0, MOST_SECONDS), effect=Effect.none)
    """Timeout in seconds of collectives, and of the arrival of all nodes at the start; a longer
    wait ends the run."""
    max_restarts: int = option(0, at_least(0, 10**6), effect=Effect.none)
    """Maximum number of restarts of all workers from the newest checkpoint, after one was lost or
    failed."""

    def __post_init__(self) -> None:
        check_options("launch", self)
        if self.nnodes > 1 and not self.rdzv_endpoint:
            raise ConfigError(
                f"launch.nnodes={self.nnodes} needs a rendezvous; set "
                "launch.rdzv_endpoint=HOST:29400 to the first node's name"
            )
