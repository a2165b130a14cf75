"""Combinations of switches that a search tries."""

import functools
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fsdptoys.config.rules.axes import split_sizes
from fsdptoys.config.schema import Config
from fsdptoys.memory import CPUOffloadExecutor, GradientCheckpointing
from fsdptoys.models import MoEConfig
from fsdptoys.parallel.capabilities import Capabilities
from fsdptoys.parallel.fsdp import ReshardAfterForward, Wrap
from fsdptoys.parallel.pipeline import PipelineSchedule

from .switches import STRATEGIES, Changes, count_parameters, read

EXECUTOR = "memory.cpu_offload_executor"
OFFLOADS = (
    "memory.activation_offload",
    "memory.optimizer_offload",
    "memory.cpu_offload",
)


@dataclass(frozen=True)
class Space:
    """Alternatives of each switch; keys from the command line are excluded."""

    strategies: Sequence[str] = tuple(STRATEGIES)
    """``single`` applies to one rank, ``ddp`` to several."""
    wraps: Sequence[Wrap] = (Wrap.block, Wrap.block_attn_mlp)
    reshards: Sequence[ReshardAfterForward] = (
        ReshardAfterForward.default,
        ReshardAfterForward.never,
    )
    every_mesh: bool = True
    """Shard axes of powers of two, the node and its multiples; ranks of a node that share
    sequences, split experts or features; and stages. Otherwise shard axes of one node and of all
    ranks."""
    activation_offload: bool = True
    optimizer_offload: bool = True
    cpu_offload: bool = True


EVERYTHING = Space()
SENSIBLE = Space(
    strategies=("fsdp2", "single"),
    wraps=(Wrap.block,),
    reshards=(ReshardAfterForward.default,),
    every_mesh=False,
    activation_offload=False,
    optimizer_offload=False,
    cpu_offload=False,
)


REDUCES_OFTEN = "parallel.reduce_each_microbatch"
# Settings of a pipeline
PIPELINE = ("mesh.pp_size", "parallel.schedule", "train.grad_accum")
SCHEDULES = (PipelineSchedule("1f1b"), PipelineSchedule.interleaved)
MICRO_BATCHES = 8
"""Micro-batches of each stage: with 1f1b stages wait for at most a ninth of a step."""

CHUNKED: tuple[Changes, ...] = (
    {"memory.chunk_loss": True},
    {"memory.chunk_loss": False},
)
"""Chunking costs so little that the alternative is tried only next to the best."""


class Combinations:
    """Combinations of a space that leave fixed keys, those of the command line, as in the composed
    ``base``."""

    def __init__(
        self,
        base: Config,
        fixed: Collection[str],
        space: Space,
        world_size: int,
        node_devices: int,
        memory_bytes: float = math.inf,
    ) -> None:
        self.base = base
        self.fixed = fixed
        self.space = space
        self.world_size = world_size
        self.memory_bytes = memory_bytes
        # All ranks are typed as -1.
        self._sizes = [
            *shard_sizes(world_size, node_devices, space.every_mesh)[:-1],
            -1,
        ]
        ranks = min(world_size, node_devices)
        self._nodes = world_size // ranks
        self._divisors = (
            [size for size in range(1, ranks + 1) if ranks % size == 0]
            if space.every_mesh
            else []
        )

    def all(self) -> Iterator[dict[str, Any]]:
        """All combinations that agree with the command line; validation may still refuse one."""
        is_single = self.world_size == 1
        table = {
            name: STRATEGIES[name].capabilities
            for name in self.space.strategies
            if STRATEGIES[name].capabilities.single_process == is_single
            or STRATEGIES[name].capabilities.shards_parameters
        }
        per_parameter = {
            name: can for name, can in table.items() if not can.flattens_parameters
        }
        if "parallel" not in self.fixed and any(
            can.shards_parameters for can in per_parameter.values()
        ):
            # FSDP1 moves the same bytes as FSDP2: it is tried only next to the best
            table = per_parameter
        for strategy in self._allowed([{"parallel": name} for name in table]):
            for changes in _products(
                [strategy], *self._lists(self._capabilities(strategy))
            ):
                # What leaves the device is tried with the smallest shards, and with others next to
                # the best.
                if changes.get("mesh.fsdp_size", -1) == -1 or not any(
                    changes.get(key) for key in OFFLOADS
                ):
                    yield changes

    def neighbors(
        self, changes: Changes, batch: int, faster: bool
    ) -> Iterator[dict[str, Any]]:
        """Combinations in its batch that differ in one switch: the strategy, its units, logits,
        exchanging axes.

        ``faster`` adds those that trade memory for speed: gathered parameters, the executor, sizes
        of the shard axis.
        """
        can = self._capabilities(changes)
        for one in self._allowed(CHUNKED):
            yield {**changes, **one}
        yield from self._exchanges(can, changes, batch, faster)
        if faster:
            yield from self._stages(can, changes)
        if not can.shards_parameters:
            return
        for one in self._of_units(changes, faster):
            merged = {**changes, **one}
            overlapped = merged.get(EXECUTOR) is CPUOffloadExecutor.overlapped
            if not overlapped or self._capabilities(merged).overlapped_cpu_offload:
                yield merged
        if faster and "mesh.fsdp_size" in changes and self.space.every_mesh:
            index = self._sizes.index(changes["mesh.fsdp_size"])
            for size in self._sizes[max(0, index - 1) : index + 2]:
                yield {**changes, "mesh.fsdp_size": size}

    def _of_units(self, changes: Changes, faster: bool) -> Iterator[Changes]:
        """Alternatives of FSDP's own settings, one at a time."""
        splits = "mesh.pp_size" in changes
        names = {
            changes.get("parallel", self.base.parallel.name),
            *(
                name
                for name in self.space.strategies
                if STRATEGIES[name].capabilities.shards_parameters
            ),
        }
        yield from self._allowed(
            [
                {"parallel": name}
                for name, kind in STRATEGIES.items()
                if name in names and (kind.capabilities.splits_layers or not splits)
            ]
        )
        if self.base.train.grad_accum > 1 and not splits:
            yield from self._allowed([{REDUCES_OFTEN: True}, {REDUCES_OFTEN: False}])
        # Not by class or size
        if getattr(self.base.parallel, "wrap", None) is not Wrap.auto:
            yield from self._allowed(
                [{"parallel.wrap": wrap} for wrap in self.space.wraps]
            )
        if faster:
            yield from self._allowed(
                [
                    {"parallel.reshard_after_forward": reshard}
                    for reshard in self.space.reshards
                ]
            )
            if EXECUTOR in changes:
                yield from self._allowed([{EXECUTOR: CPUOffloadExecutor.native}])

    def _exchanges(
        self, can: Capabilities, changes: Changes, batch: int, faster: bool
    ) -> Iterator[dict[str, Any]]:
        """Sizes of the axes cp, ep and tp within a node.

        Sequences are shared only where a rank has a single one: half as many take less memory, and
        exchange nothing. Features are split there too, and next to the fastest, into twice or half
        as many parts: each needs a skeleton.
        """
        single = batch == 1 or "train.batch_size" in self.fixed
        shards = (
            changes.get("mesh.fsdp_size", self.base.mesh.fsdp_size)
            if can.shards_parameters
            else -1
        )
        ranks = self.world_size if shards == -1 else shards
        divisors = set(self._divisors)
        parts = changes.get("mesh.tp_size", 1)
        common = math.gcd(*split_sizes(self.base.model).values())
        dividing = {size for size in divisors if common % size == 0}
        for key, applies, choices in (
            ("mesh.cp_size", single and bool(can.context_forms), divisors),
            (
                "mesh.ep_size",
                can.splits_experts and isinstance(self.base.model, MoEConfig),
                divisors,
            ),
            (
                "mesh.tp_size",
                (single or faster) and can.splits_features,
                dividing & {parts // 2, 2 * parts},
            ),
        ):
            if applies and key not in self.fixed:
                others = {name: value for name, value in changes.items() if name != key}
                sizes = (size for size in sorted(choices) if ranks % size == 0)
                yield from (
                    {**others, key: size} if size > 1 else others for size in sizes
                )

    def _stages(self, can: Capabilities, changes: Changes) -> Iterator[dict[str, Any]]:
        """Numbers of stages, over as many blocks of nodes, and their schedule.

        Within a node others exchange as fast. The first number is the least with which a rank's
        gathered parameters and full gradients fit, or twice that; then twice or half as many.
        """
        if (
            not (can.splits_layers and self.space.every_mesh)
            or "mesh.pp_size" in self.fixed
        ):
            return
        size = changes.get("mesh.pp_size", 1)
        others = {
            key: value
            for key, value in changes.items()
            if key not in (*PIPELINE, EXECUTOR)
        }
        filling = (
            self._gathered_bytes / changes.get("mesh.tp_size", 1) / self.memory_bytes
        )
        least = max(2, 2 ** math.ceil(math.log2(filling))) if filling else 2
        for ranks in (least, 2 * least) if size == 1 else (size // 2, 2 * size):
            if ranks == 1:
                yield others
            elif self._nodes % ranks == 0 and ranks <= self.base.model.n_layers:
                yield from self._pipelines(
                    others, ranks, changes.get("parallel.schedule", SCHEDULES[0])
                )
        for schedule in SCHEDULES if size > 1 else ():
            yield from self._pipelines(others, size, schedule)

    @functools.cached_property
    def _gathered_bytes(self) -> int:
        """Gathered parameters and full gradients of all layers, these in float32."""
        return count_parameters(self.base.model) * (
            self.base.parallel.param_dtype.torch.itemsize + 4
        )

    def _pipelines(
        self, others: Changes, ranks: int, schedule: PipelineSchedule
    ) -> Iterator[dict[str, Any]]:
        count = MICRO_BATCHES * ranks
        pipeline: Changes = {
            "mesh.pp_size": ranks,
            "parallel.schedule": schedule,
            "train.grad_accum": count,
        }
        # Stages keep everything on the device.
        changed = {**pipeline, **{key: False for key in OFFLOADS if key in others}}
        yield {
            **others,
            **{key: value for key, value in changed.items() if key not in self.fixed},
        }

    def _capabilities(self, changes: Changes) -> Capabilities:
        if "parallel" in changes:
            return STRATEGIES[changes["parallel"]].capabilities
        return self.base.parallel.capabilities

    def _lists(self, can: Capabilities) -> list[list[Changes]]:
        """Lists of alternatives for a strategy."""
        shards = can.shards_parameters
        # Every second size; the others are tried next to the best.
        sizes = [*self._sizes[:-1:2], -1] if shards else [-1]
        is_fixed = "memory.activation_offload" in self.fixed
        offloading = (
            (False, True) if self.space.activation_offload or is_fixed else (False,)
        )
        checkpointing: list[Changes] = [
            {"memory.gradient_checkpointing": GradientCheckpointing.none},
            *(
                {
                    "memory.gradient_checkpointing": mode,
                    "memory.activation_offload": offload,
                }
                for mode in (
                    GradientCheckpointing.selective,
                    GradientCheckpointing.full,
                )
                for offload in offloading
            ),
        ]
        offloads: list[Changes] = [
            {"memory.optimizer_offload": False, "memory.cpu_offload": False}
        ]
        if self.space.optimizer_offload:
            offloads.append(
                {"memory.optimizer_offload": True, "memory.cpu_offload": False}
            )
        if self.space.cpu_offload and shards:
            best = (
                CPUOffloadExecutor.overlapped
                if can.overlapped_cpu_offload
                else CPUOffloadExecutor.native
            )
            if EXECUTOR in self.fixed:
                best = self.base.memory.cpu_offload_executor
            offloads.append(
                {
                    "memory.cpu_offload": True,
                    "memory.optimizer_offload": False,
                    EXECUTOR: best,
                }
            )
        mesh = [{"mesh.fsdp_size": size} for size in sizes]
        return [
            self._allowed(alternatives)
            for alternatives in (
                mesh,
                checkpointing,
                self._allowed(CHUNKED)[:1],
                offloads,
            )
        ]

    def _allowed(self, alternatives: Sequence[Changes]) -> list[Changes]:
        """The alternatives that keep fixed values, or one without any change."""

        def agrees(changes: Changes) -> bool:
            return all(
                read(self.base, key) == value
                for key, value in changes.items()
                if key in self.fixed
            )

        agreeing = [
            changes for changes in alternatives if agrees(changes)
        ] or alternatives[:1]
        return [
            {key: value for key, value in changes.items() if key not in self.fixed}
            for changes in agreeing
        ]


def shard_sizes(
    world_size: int, devices_per_node: int, every: bool = True
) -> list[int]:
    """Sizes of the shard axis to try, the whole world last.

    ``every`` adds powers of two, and the node times powers of two; sizes below a node only if the
    ranks fill less than two nodes, as they gain little on a node's fast links. Otherwise the node
    alone.
    """
    sizes = {devices_per_node}
    if every:
        sizes |= {
            start << doubling
            for start in (2, devices_per_node)
            for doubling in range(world_size.bit_length())
        }
        sizes = {
            size
            for size in sizes
            if size >= devices_per_node or world_size < 2 * devices_per_node
        }
    return [
        *sorted(
            size for size in sizes if 1 < size < world_size and world_size % size == 0
        ),
        world_size,
    ]


def _products(*lists: Sequence[Changes]) -> Iterator[dict[str, Any]]:
    for parts in itertools.product(*lists):
        yield {key: value for part in parts for key, value in part.items()}
