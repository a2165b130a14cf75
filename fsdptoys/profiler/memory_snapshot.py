"""The device's memory history around a few steps, as the allocator recorded it.

History is recorded from the start, in a ring of the last ``MAX_ENTRIES`` allocations and frees, with Python's stack of
each; that costs about 2 µs an allocation, by PyTorch's documentation. It is emptied before the first of the chosen
steps and written after the last; when memory runs out it is written again. Tensors that were allocated before the start
are in the snapshot without a stack.

``torch.cuda.memory`` and ``torch.npu.memory`` have these functions under one name, but in private: they are what
PyTorch documents for this purpose. Their signatures were held against torch 2.7.1 and 2.13 and torch_npu 2.13; nothing
here has been run on an accelerator. torch_npu's own ``_dump_snapshot`` also writes a CSV and may start a profiler, so
the pickle is written here.

Source: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.regular_file import open_regular

from .memory_snapshot_page import render_snapshot

MAX_ENTRIES = 100_000
"""Allocations and frees that the ring holds, each with the stack of its call."""


class Snapshot:
    """Records and writes the history of this process's device.

    Args:
        memory: ``torch.cuda.memory``, ``torch.npu.memory``, or what has their two functions.
        device_index: whose history the page shows.
        rank: for the files' names.
        folder: where they go; made if missing.
        first_step: first step of the history.
        steps: how many there are.
        message: told where files were written, or why they were not.
    """

    def __init__(
        self,
        memory: Any,
        device_index: int,
        rank: int,
        folder: Path,
        first_step: int,
        steps: int,
        message: Callable[[str], None],
    ) -> None:
        self._memory = memory
        self._device_index = device_index
        self._name = f"memory-rank{rank}"
        self._folder = folder
        self._first_step = first_step
        self._last_step = first_step + steps - 1
        self._message = message
        self._last_done = 0
        self.paths: list[Path] = []
        """Pages that were written."""

    def start(self, next_step: int) -> None:
        """Start recording before the step of that number."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._last_done = next_step - 1
        self._record()

    def step(self, step: int) -> None:
        """Say that the step of that number is done."""
        self._last_done = step
        if step == self._first_step - 1:
            self._stop()  # empties the ring; live tensors keep their stacks
            self._record()
        if step == self._last_step:
            self._write(self._name, f"steps {self._first_step} to {step}")

    def out_of_memory(self) -> None:
        """Write what led to it."""
        self._write(f"{self._name}-out-of-memory", f"out of memory in step {self._last_done + 1}")

    def close(self) -> None:
        """Stop recording; write what there is of an unfinished window, or say that it was not reached."""
        if self._first_step <= self._last_done < self._last_step:
            self._write(self._name, f"steps {self._first_step} to {self._last_done}, where the run ended")
        elif self._last_done < self._first_step and not self.paths:
            self._message(
                f"no memory snapshot: the run ended after step {self._last_done}, before "
                f"profile.snapshot_first_step={self._first_step}"
            )
        self._stop()

    def _record(self) -> None:
        self._memory._record_memory_history(enabled="all", context="all", stacks="python", max_entries=MAX_ENTRIES)

    def _stop(self) -> None:
        self._memory._record_memory_history(enabled=None)

    def _write(self, name: str, title: str) -> None:
        snapshot = self._memory._snapshot()
        pickled, page = self._folder / f"{name}.pickle", self._folder / f"{name}.html"
        interactive = self._folder / f"{name}-interactive.html"
        try:
            pickled.unlink(missing_ok=True)  # of an earlier start, or a link that leads elsewhere
            with open_regular(pickled, "xb") as file:
                pickle.dump(snapshot, file)
            write_atomically(page, render_snapshot(snapshot, self._device_index, title, pickled.name, interactive.name))
            write_atomically(interactive, interactive_page(snapshot))
        except Exception as error:  # this runs while memory is out, or the disk full, whose own error must be seen
            self._message(f"the memory snapshot in {self._folder} is not complete: {error}")
            return
        self.paths.append(page)
        self._message(f"memory snapshot ({title}): {page}")


def interactive_page(snapshot: dict[str, Any]) -> str:
    """PyTorch's zoomable timeline with the history within it; its scripts come from the network when it is opened."""
    return str(torch.cuda._memory_viz.trace_plot(snapshot))
