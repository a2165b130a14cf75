"""A trace of a few steps by ``torch.profiler``, or by ``torch_npu.profiler`` on NPU, and a table of
operators.

The profiler waits for ``skip_steps``, traces and discards ``warmup_steps``, keeps ``active_steps``,
and writes the file. If the run ends within the window, the trace up to then is kept.

torch_npu's profiler has the same phases and calls; it writes through its own handler, logs its
errors instead of raising them, and has no ``key_averages``: its table is read from the CSV of its
analysis. Its names and keywords were compared with the Python of the torch_npu 2.13.0 wheel; it has
not been run on an NPU.

Source: https://docs.pytorch.org/docs/stable/profiler.html
"""

import csv
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.autograd import DeviceType

from fsdptoys.device import KINDS

from .config import Message, ProfileConfig

TOP_OPS = 20  # Operators in the table


@dataclass(frozen=True)
class TopOp:
    """One operator over all traced steps; times in microseconds, None if the profiler has none."""

    name: str
    calls: int
    self_cpu_us: float | None  # Without its callees
    cpu_us: float | None
    self_device_us: float | None  # Of its own kernels; None on a CPU
    # Allocated minus freed, on the device or on a CPU; None unless memory was recorded
    self_memory_bytes: int | None


class Trace:
    """Traces a window of steps on this rank, from ``first_step`` on.

    Args:
        folder: of the file; created if missing.
        message: receives the path of the trace, or the reason why there is none.
    """

    def __init__(
        self,
        config: ProfileConfig,
        device_type: str,
        rank: int,
        folder: Path,
        first_step: int,
        message: Message,
    ) -> None:
        # An NPU without torch_npu is simulated: its operators run on the host.
        package = KINDS[device_type].package
        is_simulated = package is not None and package not in sys.modules
        self._device_type = "cpu" if is_simulated else device_type
        self._config = config
        self._folder = folder
        self._first_step = first_step
        self._message = message
        self._first_traced = first_step + config.skip_steps + config.warmup_steps
        self._last_step = self._first_traced + config.active_steps - 1
        self._last_done = first_step - 1
        self._profiler: Any = None
        self._is_empty = False
        self._worker_name = f"rank{rank}"
        # The written trace: a file, or torch_npu's folder
        self.path: Path | None = None
        # First and last step of the written trace
        self.traced_steps: tuple[int, int] | None = None
        # Operators of the written trace with the largest self time, descending
        self.top_ops: list[TopOp] = []

    def start(self) -> None:
        """Start the profiler, in the phase of ``first_step``."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._profiler = (
            self._build_npu() if self._device_type == "npu" else self._build()
        )
        self._profiler.start()
        # The profiler counts calls from 0, and its marks should have the numbers of our steps.
        self._profiler.step_num = self._first_step - 1
        self._profiler.step()

    def covers(self, step: int) -> bool:
        """Whether a step is in the window or its warm-up."""
        return self._first_traced - self._config.warmup_steps <= step <= self._last_step

    def begins_after(self, step: int) -> bool:
        """Whether the next step is the first one in the file."""
        return step + 1 == self._first_traced

    def step(self, step: int) -> None:
        """Report a completed step."""
        if self._profiler is None:
            return
        self._last_done = step
        self._profiler.step()  # writes after the last step of the window
        if step >= self._last_step:
            profiler, self._profiler = self._profiler, None
            profiler.stop()

    def close(self, within_step: bool) -> None:
        """Write the trace of an unfinished window, or report that it was not reached; errors end
        ``within_step``."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._is_empty = self._last_done + within_step < self._first_traced
        profiler.stop()  # writes if the window has begun, and reports failures
        if self._is_empty:
            self._message(
                f"nothing was traced: the run ended after step {self._last_done}, and "
                "profile.skip_steps and warmup_steps set the first traced one to "
                f"{self._first_traced}"
            )

    def _options(self) -> dict[str, Any]:
        config = self._config
        return {
            "record_shapes": config.shapes,
            "profile_memory": config.memory,
            "with_stack": config.stacks,
        }

    def _phases(self) -> dict[str, int]:
        """Keywords of both ``schedule`` functions, whose positional orders differ."""
        config = self._config
        steps = {
            "warmup": config.warmup_steps,
            "active": config.active_steps,
            "repeat": 1,
        }
        return {"skip_first": self._first_step, "wait": config.skip_steps, **steps}

    def _build(self) -> Any:
        from torch.profiler import ProfilerActivity, profile, schedule

        activities = [ProfilerActivity.CPU]
        activity = KINDS[self._device_type].profiler_activity
        if activity is not None:
            activities.append(getattr(ProfilerActivity, activity))
        steps = schedule(**self._phases())
        return profile(
            activities=activities,
            schedule=steps,
            on_trace_ready=self._write,
            **self._options(),
        )

    def _build_npu(self) -> Any:
        # Only here: importing torch loads the rest of torch_npu by itself
        from torch_npu import profiler as npu

        level = self._config.npu_level.value.capitalize()
        write = npu.tensorboard_trace_handler(
            dir_name=str(self._folder), worker_name=self._worker_name, analyse_flag=True
        )

        def write_trace(profiler: Any) -> None:
            if not self._is_empty:
                write(profiler)
                self._find_npu_files()

        return npu.profile(
            activities=[npu.ProfilerActivity.CPU, npu.ProfilerActivity.NPU],
            schedule=npu.schedule(**self._phases()),
            on_trace_ready=write_trace,
            experimental_config=npu._ExperimentalConfig(
                profiler_level=getattr(npu.ProfilerLevel, level),
                export_type=npu.ExportType.Text,
            ),
            **self._options(),
        )

    def _write(self, profiler: Any) -> None:
        if self._is_empty:
            return
        path = self._folder / f"{self._worker_name}.json.gz"
        with suppress(OSError):  # reported below
            # from an earlier start, or a link to elsewhere
            path.unlink(missing_ok=True)
        try:
            profiler.export_chrome_trace(str(path))
        except OSError as error:
            self._message(
                f"{path} cannot be written ({error.strerror or error}); the run continues "
                "without the trace"
            )
            return
        self.top_ops = top_ops(
            profiler.key_averages(), self._device_type != "cpu", self._config.memory
        )
        self._report(path, "open it at https://ui.perfetto.dev or in chrome://tracing")

    def _find_npu_files(self) -> None:
        """Find the files of torch_npu's handler, which does not return them."""
        folders = sorted(
            self._folder.glob(f"{self._worker_name}_*_ascend_pt"),
            key=lambda path: path.stat().st_mtime,
        )
        folder = folders[-1] if folders else self._folder
        output = folder / "ASCEND_PROFILER_OUTPUT"
        if not output.is_dir():  # the analysis creates it
            self._message(
                f"torch_npu's profiler wrote no trace to {folder}; its own messages give the reason"
            )
            return
        statistic = output / "op_statistic.csv"
        if statistic.exists():
            self.top_ops = npu_top_ops(statistic.read_text(encoding="utf-8"))
        self._report(
            folder,
            "MindStudio Insight opens it; trace_view.json in it is for chrome://tracing",
        )

    def _report(self, path: Path, how: str) -> None:
        last = min(self._last_step, self._last_done)
        # After an exception the trace may hold only the unfinished first step.
        self.traced_steps = (self._first_traced, max(self._first_traced, last))
        self.path = path
        self._message(f"trace of {self.window}: {path} ({how})")

    @property
    def window(self) -> str:
        """The traced steps as text."""
        assert self.traced_steps is not None
        first, last = self.traced_steps
        steps = f"steps {first} to {last}" if last > first else f"step {first}"
        return (
            steps
            if last == self._last_step
            else f"{steps} (the run ended before step {self._last_step} was done)"
        )


def top_ops(averages: Any, on_device: bool, with_memory: bool) -> list[TopOp]:
    """The operators of ``profile.key_averages()`` with the largest self time, of their kernels if
    ``on_device``."""
    ops = [
        TopOp(
            # The mark of a step: its self time is outside all operators.
            name="Python, outside operators"
            if event.key.startswith("ProfilerStep")
            else event.key,
            calls=event.count,
            self_cpu_us=event.self_cpu_time_total,
            cpu_us=event.cpu_time_total,
            self_device_us=event.self_device_time_total if on_device else None,
            self_memory_bytes=(
                event.self_device_memory_usage
                if on_device
                else event.self_cpu_memory_usage
            )
            if with_memory
            else None,
        )
        for event in averages
        # Kernels also have rows of their own; adding both would count them twice.
        if event.device_type == DeviceType.CPU
    ]
    ops.sort(
        key=lambda op: -((op.self_device_us if on_device else op.self_cpu_us) or 0)
    )
    return ops[:TOP_OPS]


def npu_top_ops(op_statistic: str) -> list[TopOp]:
    """The same from the text of ``op_statistic.csv``, which CANN writes from ``level1`` on, of
    kernels only."""
    ops = [
        TopOp(
            row["OP Type"],
            int(row["Count"]),
            None,
            None,
            float(row["Total Time(us)"]),
            None,
        )
        for row in csv.DictReader(op_statistic.splitlines())
    ]
    return sorted(ops, key=lambda op: -(op.self_device_us or 0))[:TOP_OPS]
