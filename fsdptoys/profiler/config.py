"""Sections ``profile`` (steps and ranks to profile, level of detail) and ``debug`` of the
configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import MOST_STEPS, between
from fsdptoys.utils.options import Effect, check_options, option
from fsdptoys.utils.text import value_text

Message = Callable[[str], None]


class NPULevel(Enum):
    """Detail of torch_npu's profiler."""

    level0 = "level0"
    """Operators and their kernels."""
    level1 = "level1"
    """Also communication, AscendCL calls and utilization of compute units; needed for the operator
    table."""
    level2 = "level2"
    """Also the runtime and the host's operator queue."""


@dataclass
class ProfileConfig:
    """Traces and memory snapshots of a few steps."""

    enabled: bool = option(False, effect=Effect.none, alias="profiler profiling")
    """Trace a few steps with torch.profiler (torch_npu.profiler on NPU): a Chrome trace and a table
    of operators."""
    snapshot: bool = option(False, effect=Effect.none)
    """Record device allocations around a few steps, and when memory runs out; CUDA and NPU."""
    ranks: list[int] = option(
        [0], effect=Effect.none, needs=("profile.enabled", "profile.snapshot")
    )
    """Profiled ranks; the others have no overhead."""
    skip_steps: int = option(
        3, between(0, MOST_STEPS), effect=Effect.none, needs="profile.enabled"
    )
    """Steps before the profiler starts: the first ones allocate, choose kernels and compile."""
    warmup_steps: int = option(
        1, between(0, MOST_STEPS), effect=Effect.none, needs="profile.enabled"
    )
    """Traced steps to discard, since starting a trace is slow."""
    active_steps: int = option(
        3, between(1, MOST_STEPS), effect=Effect.none, needs="profile.enabled"
    )
    """Steps in the trace."""
    stacks: bool = option(False, effect=Effect.none, needs="profile.enabled")
    """Python call stack of every operator; steps are much slower and traces larger."""
    shapes: bool = option(False, effect=Effect.none, needs="profile.enabled")
    """Shapes of every operator's inputs."""
    memory: bool = option(False, effect=Effect.none, needs="profile.enabled")
    """Allocations of every operator."""
    npu_level: NPULevel = option(
        NPULevel.level1, effect=Effect.none, needs="profile.enabled"
    )
    """Detail of torch_npu's profiler; NPU only."""
    snapshot_first_step: int = option(
        1, between(1, MOST_STEPS), effect=Effect.none, needs="profile.snapshot"
    )
    """First step of the snapshot's history, from 1."""
    snapshot_steps: int = option(
        3, between(1, MOST_STEPS), effect=Effect.none, needs="profile.snapshot"
    )
    """Steps in the snapshot's history."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        check_options("profile", self)
        if (
            not self.ranks
            or min(self.ranks) < 0
            or len(set(self.ranks)) < len(self.ranks)
        ):
            raise ConfigError(
                f"profile.ranks={value_text(self.ranks)} must name at least one rank, each once "
                "and from 0; set profile.ranks=[0]"
            )

    def validate(self, world_size: int, device_type: str, steps: int) -> None:
        """Check ranks, steps and options against the run and its device; a ConfigError names the
        first mistake."""
        if (self.enabled or self.snapshot) and max(self.ranks) >= world_size:
            raise ConfigError(
                f"profile.ranks={value_text(self.ranks)} names rank {max(self.ranks)}, and the "
                f"last of {world_size} is {world_size - 1}; set profile.ranks=[0]"
            )
        if self.snapshot and device_type == "cpu":
            raise ConfigError(
                "profile.snapshot=true records the allocator of an accelerator, and this run is "
                "on a CPU; set profile.snapshot=false, or profile.enabled=true "
                "profile.memory=true for a trace with allocations"
            )
        if self.npu_level is not NPULevel.level1 and device_type != "npu":
            raise ConfigError(
                f"profile.npu_level={self.npu_level.value} does nothing on {device_type}; leave "
                "it out, which keeps profile.npu_level=level1"
            )
        before = self.skip_steps + self.warmup_steps
        if self.enabled and before + self.active_steps > steps:
            active = min(self.active_steps, steps)
            warmup = min(1, steps - active)
            raise ConfigError(
                f"profile.skip_steps={self.skip_steps}, warmup_steps={self.warmup_steps} and "
                f"active_steps={self.active_steps} need {before + self.active_steps} steps, and "
                f"train.steps={steps}; set profile.skip_steps={steps - active - warmup} "
                f"profile.warmup_steps={warmup} profile.active_steps={active}"
            )
        last = self.snapshot_first_step + self.snapshot_steps - 1
        if self.snapshot and last > steps:
            raise ConfigError(
                f"profile.snapshot_first_step={self.snapshot_first_step} and "
                f"snapshot_steps={self.snapshot_steps} end at step {last}, and "
                f"train.steps={steps}; set profile.snapshot_first_step=1 "
                f"profile.snapshot_steps={min(self.snapshot_steps, steps)}"
            )


@dataclass
class DebugConfig:
    """Diagnostics of a run."""

    trace_collectives: bool = option(False, effect=Effect.none)
    """Print every collective of one step with its sizes, and write them to
    ``collectives.jsonl``."""

    def validate(self, compiles: bool, compiles_kernels: bool) -> None:
        """Refuse ``train.compile`` and compiled kernels, with which the trace cannot work."""
        for compiles_any, setting, fix in (
            (compiles, "train.compile=true", "set train.compile=false"),
            (compiles_kernels, "kernels.*=compiled", "set them to torch"),
        ):
            if self.trace_collectives and compiles_any:
                raise ConfigError(
                    "debug.trace_collectives=true is a dispatch mode, under which PyTorch does "
                    f"not compile as {setting} asks; {fix}, which takes the same collectives"
                )
