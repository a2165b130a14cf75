"""The trainer's interface: trace and memory snapshot of this rank; no cost where both are off."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from fsdptoys.device import Device
from fsdptoys.utils.text import size_text

from .config import ProfileConfig
from .memory_snapshot import Snapshot
from .oom_report import is_out_of_memory
from .trace import TopOp, Trace


class Profiler:
    """Context manager around a run's steps, on every rank; does nothing on ranks that ``config`` does not choose.

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
        self._first_step = first_step
        self._rank, self._ranks = rank, config.ranks
        self._is_on = config.enabled or config.snapshot
        self._trace: Trace | None = None
        self._snapshot: Snapshot | None = None
        if rank not in config.ranks or not (config.enabled or config.snapshot):
            return
        assert folder is not None, "a rank that writes needs a folder"
        message = message or (lambda _: None)
        if config.enabled:
            self._trace = Trace(config, device.type, rank, folder, first_step, message)
        if config.snapshot:
            place = (device.memory_history, device.torch_device.index, rank, folder)
            self._snapshot = Snapshot(*place, config.snapshot_first_step, config.snapshot_steps, message)

    def __enter__(self) -> "Profiler":
        if self._snapshot:
            self._snapshot.start(self._first_step)
        if self._trace:
            self._trace.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, traceback: object) -> None:
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
            self._trace.step(step)
        if self._snapshot:
            self._snapshot.step(step)

    def summary_markdown(self) -> str | None:
        """This rank's files and slowest operators as Markdown below a heading; None without any."""
        if self._is_on and self._rank not in self._ranks:
            others = ", ".join(map(str, self._ranks))
            return f"Ranks {others} were profiled and wrote into `profile/`; rank {self._rank} was not."
        parts = []
        if self._trace and self._trace.path:
            parts.append(
                f"Rank {self._rank}, {self._trace.window}; the trace is `profile/{self._trace.path.name}`."
                + (f"\n\n{top_ops_table(self._trace.top_ops)}" if self._trace.top_ops else "")
            )
        if self._snapshot and self._snapshot.paths:
            pages = ", ".join(f"[profile/{path.name}](profile/{path.name})" for path in self._snapshot.paths)
            parts.append(f"Memory of rank {self._rank}: {pages}.")
        return "\n\n".join(parts) or None


def top_ops_table(ops: list[TopOp]) -> str:
    """The operators as a Markdown table of the columns with values; times are sums over the steps."""
    columns: list[tuple[str, Callable[[TopOp], str | None]]] = [
        ("operator", lambda op: f"`{op.name}`"),
        ("calls", lambda op: f"{op.calls:,}"),
        ("self device time", lambda op: _time(op.self_device_us)),
        ("self CPU time", lambda op: _time(op.self_cpu_us)),
        ("CPU time with what it calls", lambda op: _time(op.cpu_us)),
        ("self memory", lambda op: None if op.self_memory_bytes is None else size_text(op.self_memory_bytes)),
    ]
    columns = [column for column in columns if any(column[1](op) is not None for op in ops)]
    rows = [
        [heading for heading, _ in columns],
        ["---", *["---:"] * (len(columns) - 1)],
        *([cell(op) or "" for _, cell in columns] for op in ops),
    ]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def _time(microseconds: float | None) -> str | None:
    return None if microseconds is None else f"{microseconds / 1e3:,.2f} ms"
