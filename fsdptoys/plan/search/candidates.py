"""Combinations of switches that a search tries, without those that contradict the command line."""

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fsdptoys.config.schema import Config
from fsdptoys.memory import CPUOffloadExecutor, GradientCheckpointing
from fsdptoys.parallel import ParallelConfig
from fsdptoys.parallel.fsdp import ReshardAfterForward, Wrap

from .switches import STRATEGIES, Changes, read


@dataclass(frozen=True)
class Space:
    """Alternatives of each switch; keys from the command line are excluded."""

    strategies: Sequence[str] = tuple(STRATEGIES)  # ``single`` applies to one rank, ``ddp`` to several
    wraps: Sequence[Wrap] = tuple(Wrap)
    reshards: Sequence[ReshardAfterForward] = (ReshardAfterForward.default, ReshardAfterForward.never)
    every_shard_size: bool = True  # Powers of two, the node and its multiples; otherwise one node and all ranks
    activation_offload: bool = True
    optimizer_offload: bool = True
    cpu_offload: bool = True


EVERYTHING = Space()
SENSIBLE = Space(
    strategies=("fsdp2", "single"),
    wraps=(Wrap.block,),
    reshards=(ReshardAfterForward.default,),
    every_shard_size=False,
    activation_offload=False,
    optimizer_offload=False,
    cpu_offload=False,
)


CHUNKED: tuple[Changes, ...] = ({"memory.chunk_loss": True}, {"memory.chunk_loss": False})
"""Chunking costs so little that the alternative is tried only next to the best."""


class Combinations:
    """Combinations of a space that leave fixed keys, those of the command line, as in the composed ``base``."""

    def __init__(
        self, base: Config, fixed: Collection[str], space: Space, world_size: int, devices_per_node: int
    ) -> None:
        self.base, self.fixed, self.space, self.world_size = base, fixed, space, world_size
        # All ranks are typed as -1.
        self._sizes = [*shard_sizes(world_size, devices_per_node, space.every_shard_size)[:-1], -1]

    def all(self) -> Iterator[dict[str, Any]]:
        """All combinations that agree with the command line; validation may still refuse one."""
        kinds = [STRATEGIES[name] for name in self.space.strategies]
        if self.world_size == 1:
            kinds = [kind for kind in kinds if kind.single_process or kind.shards_parameters]
        else:
            kinds = [kind for kind in kinds if not kind.single_process]
        per_parameter = [kind for kind in kinds if not kind.flattens_parameters]
        if "parallel" not in self.fixed and any(kind.shards_parameters for kind in per_parameter):
            kinds = per_parameter  # FSDP1 moves the same bytes as FSDP2: it is tried only next to the best
        for strategy in self._allowed([{"parallel": kind.name} for kind in kinds]):
            yield from _products([strategy], *self._lists(self._strategy(strategy)))

    def neighbors(self, changes: Changes) -> Iterator[dict[str, Any]]:
        """Neighbors of a combination: unchunked logits, FSDP's own settings, and the next mesh sizes."""
        for chunked in self._allowed(CHUNKED):
            yield {**changes, **chunked}
        strategy = self._strategy(changes)
        if not strategy.shards_parameters:
            return
        names = [strategy.name, *(name for name in self.space.strategies if STRATEGIES[name].shards_parameters)]
        others: list[Changes] = [{"parallel": name} for name in STRATEGIES if name in names]
        executors: list[Changes] = [{}]
        if "memory.cpu_offload_executor" in changes:
            executors += [{"memory.cpu_offload_executor": CPUOffloadExecutor.native}]
        wraps: list[Changes] = [{"parallel.wrap": wrap} for wrap in self.space.wraps]
        reshards: list[Changes] = [{"parallel.reshard_after_forward": reshard} for reshard in self.space.reshards]
        for parts in _products(*(self._allowed(each) for each in (others, executors, wraps, reshards))):
            one = {**changes, **parts}
            overlapped = one.get("memory.cpu_offload_executor") is CPUOffloadExecutor.overlapped
            if not overlapped or self._strategy(one).overlaps_cpu_offload:
                yield one
        if "mesh.fsdp_size" in changes and self.space.every_shard_size:
            place = self._sizes.index(changes["mesh.fsdp_size"])
            for size in self._sizes[max(0, place - 1) : place + 2]:
                yield {**changes, "mesh.fsdp_size": size}

    def _strategy(self, changes: Changes) -> type[ParallelConfig]:
        return STRATEGIES[changes["parallel"]] if "parallel" in changes else type(self.base.parallel)

    def _lists(self, strategy: type[ParallelConfig]) -> list[list[Changes]]:
        """Lists of alternatives for a strategy."""
        shards = strategy.shards_parameters
        # Every second size; the others are tried next to the best.
        sizes = [*self._sizes[:-1:2], -1] if shards else [-1]
        typed = "memory.activation_offload" in self.fixed
        offloading = (False, True) if self.space.activation_offload or typed else (False,)
        checkpointing: list[Changes] = [
            {"memory.gradient_checkpointing": GradientCheckpointing.none},
            *(
                {"memory.gradient_checkpointing": mode, "memory.activation_offload": offload}
                for mode in (GradientCheckpointing.selective, GradientCheckpointing.full)
                for offload in offloading
            ),
        ]
        offloads: list[Changes] = [{"memory.optimizer_offload": False, "memory.cpu_offload": False}]
        if self.space.optimizer_offload:
            offloads.append({"memory.optimizer_offload": True, "memory.cpu_offload": False})
        if self.space.cpu_offload and shards:
            best = CPUOffloadExecutor.overlapped if strategy.overlaps_cpu_offload else CPUOffloadExecutor.native
            if "memory.cpu_offload_executor" in self.fixed:
                best = self.base.memory.cpu_offload_executor
            offloads.append(
                {"memory.cpu_offload": True, "memory.optimizer_offload": False, "memory.cpu_offload_executor": best}
            )
        mesh = [{"mesh.fsdp_size": size} for size in sizes]
        return [self._allowed(each) for each in (mesh, checkpointing, self._allowed(CHUNKED)[:1], offloads)]

    def _allowed(self, alternatives: Sequence[Changes]) -> list[Changes]:
        """The alternatives that keep fixed values, or one without any change."""

        def agrees(changes: Changes) -> bool:
            return all(read(self.base, key) == value for key, value in changes.items() if key in self.fixed)

        kept = [changes for changes in alternatives if agrees(changes)] or alternatives[:1]
        return [{key: value for key, value in changes.items() if key not in self.fixed} for changes in kept]


def shard_sizes(world_size: int, devices_per_node: int, every: bool = True) -> list[int]:
    """Sizes of the shard axis to try, the whole world last.

    ``every`` adds powers of two, and the node times powers of two; sizes below a node only if the ranks fill less than
    two nodes, as they gain little on a node's fast links. Otherwise the node alone.
    """
    sizes = {devices_per_node}
    if every:
        sizes |= {start << doubling for start in (2, devices_per_node) for doubling in range(world_size.bit_length())}
        sizes = {size for size in sizes if size >= devices_per_node or world_size < 2 * devices_per_node}
    return [*sorted(size for size in sizes if 1 < size < world_size and world_size % size == 0), world_size]


def _products(*lists: Sequence[Changes]) -> Iterator[dict[str, Any]]:
    for parts in itertools.product(*lists):
        yield {key: value for part in parts for key, value in part.items()}
