"""Mesh axes, and the two views of the ranks.

Ranks are numbered with the last axis varying fastest. The first axis, ``pp``, divides them into
blocks of consecutive ranks with some of the layers each (pipeline parallelism). Within a block
there are two views:

- dense view, for all parameters but those of experts: replicate × shard × tp. The ``shard × tp``
  ranks share one copy of the parameters: ``tp`` consecutive ranks split the features of each layer
  (tensor parallelism), and ``shard`` ranks shard the parameters of equal features. Groups of ``cp``
  ranks along the shard axis share each sequence (context parallelism), so this axis is also data ×
  cp, and reducing gradients along it adds up the parts of a sequence.
- sparse view, for parameters of experts: replicate × efsdp × ep. ``ep`` consecutive ranks split the
  experts, and the ``efsdp`` ranks that have the same experts shard them. The ranks of tp have
  tokens of their own there.

A size of 1 switches an axis off. Without replicas a mesh has no replicate axis: FSDP2 treats a (1,
N) mesh as hybrid and keeps every reduced gradient on the device until the backward ends.
"""

from dataclasses import dataclass
from typing import Any

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import MOST_RANKS, at_least
from fsdptoys.utils.options import Effect, check_options, option

SHARD_AXIS = "shard"
REPLICATE_AXIS = "replicate"
CONTEXT_AXIS = "cp"
TENSOR_AXIS = "tp"
PIPE_AXIS = "pp"
EXPERT_AXIS = "ep"
EXPERT_SHARD_AXIS = "efsdp"
AXES = (
    PIPE_AXIS,
    REPLICATE_AXIS,
    SHARD_AXIS,
    EXPERT_SHARD_AXIS,
    CONTEXT_AXIS,
    TENSOR_AXIS,
    EXPERT_AXIS,
)
EXCHANGING_AXES = (PIPE_AXIS, CONTEXT_AXIS, TENSOR_AXIS, EXPERT_AXIS)
"""Axes whose transfers are issued within or between layers, while parameters are gathered along
another."""

NODE = "node"
"""``mesh.fsdp_size=node`` keeps each copy of the parameters within a node."""

HYBRID = "hybrid"
"""``mesh.fsdp_size=hybrid`` is ``node`` on several nodes, and the largest size that leaves two
copies on one node."""


@dataclass
class MeshConfig:
    """Layout of the ranks."""

    fsdp_size: Any = option(
        -1, effect=Effect.rounding, alias="data_parallel_shard_degree dp_shard"
    )
    """Ranks that share one copy of the parameters: a number, node, hybrid, or -1 for all. The
    others replicate (HSDP).

    ``node`` is the ranks of a node; ``hybrid`` is ``node`` on several nodes, and half of the ranks
    on one.
    """
    cp_size: int = option(
        1,
        at_least(1, MOST_RANKS),
        effect=Effect.rounding,
        alias="cp cp_degree context_parallel context_parallel_size context_parallel_degree "
        "sequence_parallel_size sp_size",
    )
    """Ranks that share each sequence (context parallelism); divides ``fsdp_size / tp_size``."""
    ep_size: int = option(
        1,
        at_least(1, MOST_RANKS),
        effect=Effect.rounding,
        alias="ep ep_size expert_parallel expert_parallel_size expert_model_parallel_size "
        "expert_parallel_degree ep_degree moe_expert_parallel_size",
    )
    """Consecutive ranks that split the experts (expert parallelism, FSDP2); divides ``fsdp_size``
    and ``n_experts``."""
    tp_size: int = option(
        1,
        at_least(1, MOST_RANKS),
        effect=Effect.rounding,
        alias="tp tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree "
        "tensor_model_parallel_size tp_degree",
    )
    """Consecutive ranks that split each layer's features (tensor parallelism, FSDP2); divides
    ``fsdp_size``."""
    pp_size: int = option(
        1,
        at_least(1, MOST_RANKS),
        effect=Effect.rounding,
        alias=(
            "pp pp_size pp_degree pipeline_parallel pipeline_parallel_size "
            "pipeline_parallel_degree pipeline_model_parallel_size"
        ),
    )
    """Blocks of consecutive ranks that have a part of the layers each (pipeline parallelism,
    FSDP2)."""

    def __post_init__(self) -> None:
        check_options("mesh", self)
        if self.fsdp_size in (NODE, HYBRID):
            return
        if type(self.fsdp_size) is not int:
            raise ConfigError(
                f"mesh.fsdp_size={self.fsdp_size} must be a number of ranks, {NODE} for those of "
                f"a node, {HYBRID} for at least two copies, or -1 for all ranks; set "
                f"mesh.fsdp_size={NODE}"
            )
        if self.fsdp_size < 1 and self.fsdp_size != -1:
            raise ConfigError(
                f"mesh.fsdp_size={self.fsdp_size} must be at least 1, or -1 for all ranks; set "
                "mesh.fsdp_size=-1"
            )

    def resolve(self, world_size: int, node_ranks: int) -> None:
        """Replace ``node`` and ``hybrid`` by a number.

        Raises:
            ConfigError: if nodes have different numbers of ranks.
        """
        if self.fsdp_size in (NODE, HYBRID):
            world_size = self.stage_ranks(world_size)
        if self.fsdp_size == HYBRID and not 1 < node_ranks < world_size:
            self.fsdp_size = max(
                (
                    size
                    for size in range(1, world_size // 2 + 1)
                    if world_size % size == 0
                ),
                default=1,
            )
        if self.fsdp_size in (NODE, HYBRID):
            size = min(node_ranks, world_size)
            if world_size % size:
                raise ConfigError(
                    f"mesh.fsdp_size={self.fsdp_size} needs equally many ranks on each node, and "
                    f"{world_size} ranks are no multiple of the {size} of this one; start as "
                    "many on each, or set mesh.fsdp_size=-1"
                )
            self.fsdp_size = size

    def stage_ranks(self, world_size: int) -> int:
        """Ranks that have the same layers.

        Raises:
            ConfigError: if the stages do not divide the world size.
        """
        if world_size % self.pp_size:
            fitting = max(
                size
                for size in range(1, min(self.pp_size, world_size) + 1)
                if world_size % size == 0
            )
            raise ConfigError(
                f"mesh.pp_size={self.pp_size} must divide the world size {world_size}; set "
                f"mesh.pp_size={fitting} or launch.nproc_per_node={self.pp_size}"
            )
        return world_size // self.pp_size

    def shard_ranks(self, world_size: int) -> int:
        """Ranks that share one copy of the parameters, of a resolved configuration.

        Raises:
            ConfigError: if they do not divide the ranks of a stage.
        """
        size = self.fsdp_size
        ranks = self.stage_ranks(world_size)
        assert isinstance(size, int), "it must have been resolved"
        if size == -1:
            return ranks
        if ranks % size:
            divisor = max(d for d in range(1, min(size, ranks) + 1) if ranks % d == 0)
            of = (
                f"world size {ranks}"
                if self.pp_size == 1
                else f"{ranks} ranks of each of mesh.pp_size={self.pp_size}"
            )
            raise ConfigError(
                f"mesh.fsdp_size={size} must divide the {of}; "
                f"set mesh.fsdp_size={divisor} or launch.nproc_per_node={size * self.pp_size}"
            )
        return size

    def axes(self, world_size: int, shards: bool, experts: int = 0) -> "Axes":
        """Sizes of the axes of a resolved configuration.

        Args:
            world_size: ranks.
            shards: whether the strategy shards parameters over ``fsdp_size`` ranks.
            experts: of the model, which a suggested ``ep_size`` divides; 0 if not known.

        Raises:
            ConfigError: if sizes do not divide.
        """
        stage = self.stage_ranks(world_size)
        ranks = self.shard_ranks(world_size) if shards else stage
        shard = ranks // self.tp_size
        for key, size, whole, parts in (
            ("tp_size", self.tp_size, ranks, 0),
            ("cp_size", self.cp_size, shard, 0),
            ("ep_size", self.ep_size, ranks, experts),
        ):
            if whole % size:
                of = (
                    f"{whole} ranks that share a copy of the parameters"
                    if shards
                    else f"world size {world_size}"
                )
                of += (
                    f" and features (mesh.tp_size={self.tp_size})"
                    if whole < ranks
                    else ""
                )
                fitting = max(
                    n
                    for n in range(1, min(size, whole) + 1)
                    if whole % n == 0 and parts % n == 0
                )
                raise ConfigError(
                    f"mesh.{key}={size} must divide the {of}; set mesh.{key}={fitting}"
                )
        return Axes(
            stage // ranks,
            shard,
            self.cp_size,
            self.ep_size,
            self.tp_size,
            self.pp_size,
        )


@dataclass(frozen=True)
class Axes:
    """Sizes of the mesh axes; without sharding all ranks are along the shard axis."""

    replicate: int
    shard: int
    cp: int
    ep: int
    tp: int = 1
    pp: int = 1

    @property
    def copies(self) -> dict[str, int]:
        """The replicate axis and its size; nothing without replicas."""
        return {REPLICATE_AXIS: self.replicate} if self.replicate > 1 else {}

    @property
    def stage_ranks(self) -> int:
        """Ranks that have the same layers; those of another stage at the same place have the same
        sequences."""
        return self.replicate * self.ranks_per_replica

    @property
    def data_ranks(self) -> int:
        """Groups of ranks with sequences of their own."""
        return self.replicate * self.shard // self.cp

    @property
    def sharing(self) -> int:
        """Number of consecutive ranks that share sequences; each has a part of the tokens."""
        return self.cp * self.tp

    def sizes(self, world_size: int, shards: int) -> dict[str, int]:
        """Mesh axis → ranks along it, of a strategy that shards over ``shards`` ranks."""
        replicas = world_size // shards // self.tp // self.pp
        dense = {PIPE_AXIS: self.pp, REPLICATE_AXIS: replicas, SHARD_AXIS: shards}
        return dense | {
            CONTEXT_AXIS: self.cp,
            TENSOR_AXIS: self.tp,
            EXPERT_AXIS: self.ep,
        }

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that share one copy of the parameters."""
        return self.shard * self.tp

    @property
    def efsdp(self) -> int:
        """Ranks that have the same experts, and shard them, in each copy of the parameters."""
        return self.ranks_per_replica // self.ep


def straddling(shard_ranks: int, world_size: int, node_ranks: int) -> str | None:
    """A warning where shard groups straddle nodes although another size would avoid it.

    Groups begin and end with nodes if their size divides a node's ranks or is a multiple of them.
    """
    if shard_ranks in (1, world_size) or node_ranks >= world_size:
        return None
    if shard_ranks % node_ranks == 0 or node_ranks % shard_ranks == 0:
        return None
    return (
        f"mesh.fsdp_size={shard_ranks} on nodes of {node_ranks} ranks has groups that lie across "
        "two nodes, so that every gather waits for the network between them; "
        f"mesh.fsdp_size={NODE} keeps each within one"
    )
