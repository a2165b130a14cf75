"""The trainer's interface: trace and memory snapshot of this rank; no cost where both are off."""

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fsdptoys.device import Device

from .config import ProfileConfig
from .memory_snapshot import Snapshot
from .oom_report import is_out_of_memory
from .trace import Trace


class Profiler:
    """Context manager around a run's steps, on every rank; does nothing on ranks that ``config``
    does not choose.

    Args:
        folder: of the files, created by the first rank that writes; the same path on every rank.
        message: receives the paths of written files, on the chosen ranks.
    """

    def __init__(
        self,
        config: ProfileConfig,
        device: Device,
        rank: int,
        folder: Path | None,
        first_step: int = 1,
        message: Callable[[str], None] | None = None,
    ) -> None:
        self._device = device
        self._first_step = first_step
        self._rank = rank
        self._ranks = config.ranks
        self._is_on = config.enabled or config.snapshot
        self._trace: Trace | None = None
        self._snapshot: Snapshot | None = None
        if rank not in config.ranks or not self._is_on:
            return
        assert folder is not None, "a rank that writes needs a folder"
        message = message or (lambda _: None)
        if config.enabled:
            self._trace = Trace(config, device.type, rank, folder, first_step, message)
        if config.snapshot:
            self._snapshot = Snapshot(
                device.memory_history,
                device.torch_device.index,
                rank,
                folder,
                config.snapshot_first_step,
                config.snapshot_steps,
                message,
            )

    def __enter__(self) -> "Profiler":
        if self._snapshot:
            self._snapshot.start(self._first_step)
        if self._trace:
            self._trace.start()
        return self

    def __exit__(
        self, _: object, error: BaseException | None, traceback: object
    ) -> None:
        with ExitStack() as closing:  # each, even if the other fails
            if self._trace:
                closing.callback(self._trace.close, error is not None)
            if self._snapshot:
                closing.callback(self._snapshot.close)
                if error is not None and is_out_of_memory(error):
                    self._snapshot.out_of_memory()

    def step(self, step: int) -> None:
        """Report a completed step."""
        if self._trace:
            if self._trace.begins_after(step):
                # kernels of this step would otherwise run, and be traced, within the next
                self._device.synchronize()
            self._trace.step(step)
        if self._snapshot:
            self._snapshot.step(step)

    def traces(self, step: int) -> bool:
        """Whether torch.profiler is on in a step, including its warm-up."""
        return self._trace is not None and self._trace.covers(step)

    def findings(self) -> dict[str, Any] | None:
        """Written files and slowest operators of this rank, as plain values; None without any.

        On a rank that was not chosen: the chosen ranks.
        """
        findings: dict[str, Any] = {"rank": self._rank, "ranks": self._ranks}
        if self._is_on and self._rank not in self._ranks:
            return findings
        if self._trace and self._trace.path:
            operators = [dataclasses.asdict(op) for op in self._trace.top_ops]
            findings |= {
                "trace_file": self._trace.path.name,
                "traced_steps": self._trace.window,
                "operators": operators,
            }
        if self._snapshot and self._snapshot.paths:
            findings["snapshot_files"] = [path.name for path in self._snapshot.paths]
        return findings if len(findings) > 2 else None
