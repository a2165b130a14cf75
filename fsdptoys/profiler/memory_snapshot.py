"""The allocator's memory history around a few steps.

The history is a ring of the last ``MAX_ENTRIES`` allocations and frees, each with its Python stack,
at about 2 µs an allocation by PyTorch's documentation. It is recorded from the start, emptied
before the first chosen step, written after the last one, and written again when memory runs out.
Tensors from before the start have no stack.

``torch.cuda.memory`` and ``torch.npu.memory`` share these private functions, which PyTorch
documents for this purpose. Their signatures were compared with torch 2.7.1 and 2.13 and torch_npu
2.13; nothing here has been run on an accelerator. The pickle is written here, since torch_npu's
``_dump_snapshot`` also writes a CSV and may start a profiler.

Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
"""

import pickle
from pathlib import Path
from typing import Any

import torch

from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.regular_file import open_regular

from .config import Message
from .memory_snapshot_page import render_snapshot

MAX_ENTRIES = 100_000  # Allocations and frees in the ring


class Snapshot:
    """Records and writes the history of this process's device.

    Args:
        memory: ``torch.cuda.memory``, ``torch.npu.memory``, or a module with their two functions.
        folder: of the files; created if missing.
        message: receives the path of each page, or the reason why there is none.
    """

    def __init__(
        self,
        memory: Any,
        device_index: int,
        rank: int,
        folder: Path,
        first_step: int,
        steps: int,
        message: Message,
    ) -> None:
        self._memory = memory
        self._device_index = device_index
        self._name = f"memory-rank{rank}"
        self._folder = folder
        self._message = message
        self._first_step = first_step
        self._last_step = first_step + steps - 1
        self._last_done = 0
        self.paths: list[Path] = []  # Pages written so far

    def start(self, next_step: int) -> None:
        """Start recording before a step."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._last_done = next_step - 1
        self._record()

    def step(self, step: int) -> None:
        """Report a completed step."""
        self._last_done = step
        if step == self._first_step - 1:
            self._stop()  # empties the ring; live tensors keep their stacks
            self._record()
        if step == self._last_step:
            self._write(self._name, f"steps {self._first_step} to {step}")

    def out_of_memory(self) -> None:
        """Write the history up to the failure."""
        self._write(
            f"{self._name}-out-of-memory",
            f"out of memory in step {self._last_done + 1}",
        )

    def close(self) -> None:
        """Stop recording; write an unfinished window, or report that it was not reached."""
        if self._first_step <= self._last_done < self._last_step:
            self._write(
                self._name,
                f"steps {self._first_step} to {self._last_done}, where the run ended",
            )
        elif self._last_done < self._first_step and not self.paths:
            self._message(
                f"no memory snapshot: the run ended after step {self._last_done}, before "
                f"profile.snapshot_first_step={self._first_step}"
            )
        self._stop()

    def _record(self) -> None:
        self._memory._record_memory_history(
            enabled="all", context="all", stacks="python", max_entries=MAX_ENTRIES
        )

    def _stop(self) -> None:
        self._memory._record_memory_history(enabled=None)

    def _write(self, name: str, title: str) -> None:
        snapshot = self._memory._snapshot()
        pickled = self._folder / f"{name}.pickle"
        page = self._folder / f"{name}.html"
        interactive = self._folder / f"{name}-interactive.html"
        try:
            # from an earlier start, or a link to elsewhere
            pickled.unlink(missing_ok=True)
            with open_regular(pickled, "xb") as file:
                pickle.dump(snapshot, file)
            write_atomically(
                page,
                render_snapshot(
                    snapshot, self._device_index, title, pickled.name, interactive.name
                ),
            )
            # PyTorch's zoomable timeline, for which the browser loads scripts from the network
            write_atomically(
                interactive, str(torch.cuda._memory_viz.trace_plot(snapshot))
            )
        except Exception as error:
            # must not hide the error of full memory or a full disk
            self._message(
                f"the memory snapshot in {self._folder} is not complete: {error}"
            )
            return
        self.paths.append(page)
        self._message(f"memory snapshot ({title}): {page}")
