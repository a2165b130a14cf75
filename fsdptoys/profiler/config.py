"""Settings of ``configs/profile``: which steps and ranks are looked at, and how closely.

Settings of ``debug``: what a run can be asked to tell of itself.
"""

import dataclasses
from dataclasses import dataclass, field
from enum import Enum

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import MOST_STEPS, check_at_most
from fsdptoys.utils.text import value_text


class NPULevel(Enum):
    """How much torch_npu's profiler collects."""

    level0 = "level0"
    """Operators and their kernels."""
    level1 = "level1"
    """Also communication, AscendCL calls and the use of the compute units, which the table of operators needs."""
    level2 = "level2"
    """Also what the runtime and the host's operator queue do."""


@dataclass
class ProfileConfig:
    """Where the time and the memory of a few steps go."""

    enabled: bool = False
    """Trace a few steps with torch.profiler (torch_npu.profiler on NPU): a Chrome trace and a table of operators."""
    snapshot: bool = False
    """Record every allocation on the device around a few steps, and when memory runs out; CUDA and NPU."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that are looked at; the others pay nothing."""
    skip_steps: int = 3
    """Steps before the profiler wakes up: the first ones allocate, choose kernels and compile."""
    warmup_steps: int = 1
    """Steps that are traced and thrown away, since starting to trace is slow itself."""
    active_steps: int = 3
    """Steps in the trace."""
    stacks: bool = False
    """Python's call stack of every operator; makes steps much slower and traces larger."""
    shapes: bool = False
    """Shapes of every operator's inputs."""
    memory: bool = False
    """What every operator allocates and frees."""
    npu_level: NPULevel = NPULevel.level1
    """How much torch_npu's profiler collects; other devices have no such levels."""
    snapshot_first_step: int = 1
    """First step of the snapshot's history, from 1."""
    snapshot_steps: int = 3
    """Steps in the snapshot's history."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        least = {"skip_steps": 0, "warmup_steps": 0, "active_steps": 1, "snapshot_first_step": 1, "snapshot_steps": 1}
        check_at_most("profile", self, **dict.fromkeys(least, MOST_STEPS))
        for name, bound in least.items():
            value = getattr(self, name)
            if value < bound:
                raise ConfigError(f"profile.{name}={value} must be at least {bound}; set profile.{name}={bound}")
        if not self.ranks or min(self.ranks) < 0 or len(set(self.ranks)) < len(self.ranks):
            raise ConfigError(
                f"profile.ranks={value_text(self.ranks)} must name at least one rank, each once and from 0; "
                "set profile.ranks=[0]"
            )
        self._refuse_without_switch()

    def validate(self, world_size: int, device_type: str, steps: int) -> None:
        """Refuse ranks and steps that the run does not have, and what its device cannot record.

        Args:
            world_size: ranks over all machines.
            device_type: ``cuda``, ``npu`` or ``cpu``.
            steps: optimizer steps of the run.

        Raises:
            ConfigError: in one sentence naming key, value and fix.
        """
        if (self.enabled or self.snapshot) and max(self.ranks) >= world_size:
            raise ConfigError(
                f"profile.ranks={value_text(self.ranks)} names rank {max(self.ranks)}, and the last of {world_size} is "
                f"{world_size - 1}; set profile.ranks=[0]"
            )
        if self.snapshot and device_type == "cpu":
            raise ConfigError(
                "profile.snapshot=true records the allocator of an accelerator, and this run is on a CPU; set "
                "profile.snapshot=false, or profile.enabled=true profile.memory=true for a trace with allocations"
            )
        if self.npu_level is not NPULevel.level1 and device_type != "npu":
            raise ConfigError(
                f"profile.npu_level={self.npu_level.value} does nothing on {device_type}; leave it out, which "
                "keeps profile.npu_level=level1"
            )
        before = self.skip_steps + self.warmup_steps
        if self.enabled and before + self.active_steps > steps:
            raise ConfigError(
                f"profile.skip_steps={self.skip_steps}, warmup_steps={self.warmup_steps} and "
                f"active_steps={self.active_steps} need {before + self.active_steps} steps, and train.steps={steps}; "
                + _window_fix(steps, self.active_steps)
            )
        last = self.snapshot_first_step + self.snapshot_steps - 1
        if self.snapshot and last > steps:
            raise ConfigError(
                f"profile.snapshot_first_step={self.snapshot_first_step} and snapshot_steps={self.snapshot_steps} end "
                f"at step {last}, and train.steps={steps}; set profile.snapshot_first_step=1 "
                f"profile.snapshot_steps={min(self.snapshot_steps, steps)}"
            )

    def _refuse_without_switch(self) -> None:
        """Refuse options that would do nothing as the switch that they belong to is set."""
        switches = {
            **dict.fromkeys(
                ("skip_steps", "warmup_steps", "active_steps", "stacks", "shapes", "memory", "npu_level"),
                (self.enabled, "profile.enabled=true"),
            ),
            **dict.fromkeys(("snapshot_first_step", "snapshot_steps"), (self.snapshot, "profile.snapshot=true")),
            "ranks": (self.enabled or self.snapshot, "profile.enabled=true or profile.snapshot=true"),
        }
        defaults = {
            spec.name: spec.default_factory() if callable(spec.default_factory) else spec.default
            for spec in dataclasses.fields(self)
        }
        for name, (on, switch) in switches.items():
            value = getattr(self, name)
            if not on and value != defaults[name]:
                raise ConfigError(
                    f"profile.{name}={value_text(value)} does nothing as set; set {switch} or leave it out"
                )


def _window_fix(steps: int, active_steps: int) -> str:
    """Settings with which the window fits into ``steps``, as far back as that allows."""
    active = min(active_steps, steps)
    warmup = min(1, steps - active)
    return (
        f"set profile.skip_steps={steps - active - warmup} profile.warmup_steps={warmup} profile.active_steps={active}"
    )


@dataclass
class DebugConfig:
    """What a run tells of its inside."""

    trace_collectives: bool = False
    """Print every collective of one step with its sizes, and write them to ``collectives.jsonl``."""

    def validate(self, compiles: bool, compiles_kernels: bool) -> None:
        """Refuse where it cannot work.

        Args:
            compiles: ``train.compile``.
            compiles_kernels: whether any of ``kernels`` is ``compiled``.

        Raises:
            ConfigError: naming key, value and fix.
        """
        if self.trace_collectives and compiles:
            raise ConfigError(
                "debug.trace_collectives=true is a dispatch mode, under which PyTorch does not compile as "
                "train.compile=true asks; set train.compile=false, which takes the same collectives"
            )
        if self.trace_collectives and compiles_kernels:
            raise ConfigError(
                "debug.trace_collectives=true is a dispatch mode, under which PyTorch does not compile as "
                "kernels.*=compiled asks; set them to torch, which takes the same collectives"
            )
