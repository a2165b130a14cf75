"""Memory over the profiled steps by category, from the profiler's traces and memory snapshots.

Neither a trace nor a snapshot states the purpose of a block, but both record its allocation and
free, and a step has phases. Blocks allocated in a forward and freed in its backward are
activations; blocks allocated in a backward that outlive it are gradients; blocks freed in the phase
of their allocation are temporary. :class:`Lifetime` names these pairs of measured phases.

Memory allocated before the first traced step is a single sum in CUDA traces and missing in CPU
traces: their profiler counts from its own start.

Snapshots are read by an unpickler limited to plain lists and dicts, since foreign pickles could run
code.
"""

import bisect
import contextlib
import gzip
import itertools
import operator
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO, Any

import numpy as np

from fsdptoys.errors import ConfigError
from fsdptoys.utils.foreign import parse_json
from fsdptoys.utils.regular_file import open_regular
from fsdptoys.utils.text import one_line, short_text

# Limit of the compressed file; larger ones take minutes to read
LARGEST_TRACE_BYTES = 2**26
LARGEST_UNPACKED_BYTES = 2**30
LARGEST_SNAPSHOT_BYTES = 2**29
LARGEST_NUMBER = 2**62  # Limit of bytes and of microseconds since 1970


class Lifetime(Enum):
    """Phases between which a block was live."""

    before = "live before the first event"
    persistent = "allocated in an update and kept (optimizer states)"
    gradients = "from a backward until after it (gradients)"
    activations = "from a forward to a backward (activations)"
    temporary = "within one phase (temporary)"
    other = "any other"


Change = tuple[float, Any, int]
"""Moment, address and bytes of an allocation; negative bytes for a free."""

Mark = tuple[float, str]
"""Start and name of a phase: ``forward``, ``backward``, ``update``."""


@dataclass(frozen=True)
class Timeline:
    """Bytes by lifetime after each event."""

    file: str
    moments: np.ndarray
    unit: str  # ``ms``, or empty if moments are event numbers
    layers: dict[Lifetime, np.ndarray]
    backwards: list[tuple[float, float]]  # Start and end of each backward
    device: str  # Kind of memory, as an axis title
    knows_before: bool  # Whether memory allocated before the history is included

    @property
    def total(self) -> np.ndarray:
        """Bytes over all lifetimes."""
        return np.sum(list(self.layers.values()), axis=0)


def read_timeline(folder: Path, device_type: str) -> Timeline | None:
    """Memory history of the first rank that recorded one in ``profile``, preferring snapshots; None
    if there is none.

    Raises:
        ConfigError: for an unreadable file.
    """
    for path in sorted(folder.glob("memory-rank*.pickle")):
        return read_snapshot(path)
    for path in sorted(folder.glob("rank*.json.gz")):
        return read_trace(path, device_type)
    return None


def read_trace(path: Path, device_type: str) -> Timeline | None:
    """Read a trace of ``torch.profiler``; None if it was taken without ``profile.memory=true``."""
    with _opened(
        path, LARGEST_TRACE_BYTES, "take the trace again with profile.memory=true"
    ) as packed:
        with gzip.open(packed) as file:
            text = file.read(LARGEST_UNPACKED_BYTES + 1)
        if len(text) > LARGEST_UNPACKED_BYTES:
            raise ValueError(
                f"it holds more than {LARGEST_UNPACKED_BYTES // 2**20} MiB"
            )
        events = parse_json(text, non_finite=True)["traceEvents"]
        # C10's device type numbers; NPUs write no such trace
        device_number = 0 if device_type == "cpu" else 1
        memory = sorted(
            (
                e
                for e in events
                if e.get("name") == "[memory]"
                and e["args"]["Device Type"] == device_number
            ),
            key=lambda e: (_checked(e["ts"]), _checked(e["args"].get("Ev Idx", 0))),
        )
        if not memory:
            return None
        start = float(memory[0]["ts"])
        first = memory[0]["args"]
        changes = [
            (
                (e["ts"] - start) / 1e3,
                e["args"]["Addr"],
                int(_checked(e["args"]["Bytes"])),
            )
            for e in memory
        ]
        marks = [
            ((moment - start) / 1e3, name) for moment, name in _phase_marks(events)
        ]
        before = int(_checked(first["Total Allocated"])) - int(first["Bytes"])
        kind = "host" if device_type == "cpu" else "device"
        return _timeline(
            path.name, changes, "ms", marks, f"{kind} memory in tensors", before
        )


def read_snapshot(path: Path) -> Timeline | None:
    """Read a memory snapshot; moments are event numbers, since not all events have a time."""
    with _opened(path, LARGEST_SNAPSHOT_BYTES, "take the snapshot again") as file:
        snapshot = _Plain(file).load()
        traces = snapshot["device_traces"]
        device = max(
            range(len(traces)), key=lambda index: len(traces[index]), default=0
        )
        events = [
            e for e in traces[device] if e["action"] in ("alloc", "free_completed")
        ]
        live = sum(
            int(_checked(block.get("requested_size", block["size"])))
            for segment in snapshot["segments"]
            if segment.get("device", 0) == device
            for block in segment["blocks"]
            if block["state"] != "inactive"
        )
        signs = {"alloc": 1, "free_completed": -1}
        changes = [
            (float(i), e["addr"], signs[e["action"]] * int(_checked(e["size"])))
            for i, e in enumerate(events, 1)
        ]
        # Only allocations mark the start of a phase: a free inside one can come from anywhere.
        stacks = zip(
            changes, (event.get("frames", []) for event in events), strict=True
        )
        marks = [
            (moment, phase_of_stack(frames))
            for (moment, _, size), frames in stacks
            if size > 0
        ]
        if not changes:
            return None
        before = live - sum(size for _, _, size in changes)
        marks[:1] = [(0.0, name) for _, name in marks[:1]]
        return _timeline(
            path.name, changes, "", marks, "device memory in tensors", before
        )


@contextlib.contextmanager
def _opened(path: Path, largest: int, fix: str) -> Iterator[IO[bytes]]:
    """Open a file; report a malformed one. Its values, maybe millions, are not validated one by
    one."""
    try:
        with open_regular(path) as file:
            if path.stat().st_size > largest:
                raise ValueError(f"it is larger than {largest // 2**20} MiB")
            yield file
    except Exception as mistake:
        reason = one_line(mistake if str(mistake) else type(mistake).__name__)
        raise ConfigError(f"{path} cannot be read ({reason}); {fix}") from None


def _checked(value: float) -> float:
    """Raise ValueError unless a value is a number of at most ``LARGEST_NUMBER``."""
    if type(value) not in (int, float) or not abs(value) <= LARGEST_NUMBER:
        raise ValueError(f"{short_text(value)} is no number of bytes or microseconds")
    return value


UPDATES = {
    ("memory/optimizer_stepper.py", "step"),
    ("memory/bucketed_optimizer.py", "finish"),
}
"""Files and functions of the optimizer's updates."""


def phase_of_stack(frames: Sequence[dict[str, Any]]) -> str:
    """Phase of an allocation, by its Python stack.

    Autograd's thread has no Python frames below its hooks, so a stack without the trainer belongs
    to a backward.
    """
    calls = {
        (frame["filename"].rpartition("fsdptoys/")[2], frame["name"])
        for frame in frames
    }
    if calls & UPDATES:
        return "update"
    in_backward = any(
        frame["filename"].endswith("torch/autograd/graph.py") for frame in frames
    )
    in_trainer = any(file == "train/trainer.py" for file, _ in calls)
    return "backward" if in_backward or not in_trainer else "forward"


def _phase_marks(events: Iterable[dict[str, Any]]) -> list[Mark]:
    """Phase starts in a trace: a forward begins with the token embedding, a backward with
    autograd's next function."""
    marks: list[Mark] = []
    for event in events:
        name = event.get("name", "")
        if event.get("ph") != "X":
            continue
        if name.startswith("Optimizer.step#"):
            start = _checked(event["ts"])
            marks += [(start, "update"), (start + _checked(event["dur"]), "forward")]
        elif name.startswith("autograd::engine::evaluate_function"):
            marks.append((_checked(event["ts"]), "backward"))
        elif name == "aten::embedding" or name.startswith("ProfilerStep#"):
            marks.append((_checked(event["ts"]), "forward"))
    return sorted(marks)


def lifetime(begin: float, end: float, phases: Sequence[Mark]) -> Lifetime:
    """Classify a block by the phases of its allocation and its free.

    Args:
        begin: moment of the allocation; -infinite if it predates the history.
        end: moment of the free; infinite if the block outlives the history.
        phases: in their order.
    """
    if begin == -np.inf:
        return Lifetime.before
    begun, ended = (
        max(bisect.bisect_right(phases, moment, key=operator.itemgetter(0)) - 1, 0)
        for moment in (begin, end)
    )
    first, last = (
        phases[index][1] if phases else "forward" for index in (begun, ended)
    )
    # Blocks cut off by the end of the history are classified as in earlier steps.
    if end < np.inf:
        if begun == ended:
            return Lifetime.temporary
        if first == "forward" and last == "backward":
            return Lifetime.activations
    return {"update": Lifetime.persistent, "backward": Lifetime.gradients}.get(
        first, Lifetime.other
    )


def _timeline(
    file: str,
    changes: Sequence[Change],
    unit: str,
    marks: Sequence[Mark],
    device: str,
    before: int,
) -> Timeline:
    """Sum blocks by lifetime; ``before`` is the number of bytes live before the first event."""
    # Consecutive marks of one name are one phase.
    phases = [
        next(group) for _, group in itertools.groupby(marks, key=operator.itemgetter(1))
    ]
    order = np.unique([moment for moment, _, _ in changes])
    sums = {kind: np.zeros(len(order) + 1) for kind in Lifetime}

    def add(size: int, begin: float, end: float) -> None:
        layer = sums[lifetime(begin, end, phases)]
        layer[np.searchsorted(order, begin)] += size
        layer[np.searchsorted(order, end)] -= size

    live: dict[Any, tuple[float, int]] = {}
    freed = 0  # Bytes from before the first event
    for moment, address, size in changes:
        if size > 0:
            live[address] = moment, size
        elif size < 0:
            begin, allocated = live.pop(address, (-np.inf, -size))
            add(allocated, begin, moment)
            freed += allocated * (begin == -np.inf)
    if before > freed:
        add(before - freed, -np.inf, np.inf)
    for begin, size in live.values():
        add(size, begin, np.inf)
    layers = {
        kind: np.cumsum(layer[:-1]) for kind, layer in sums.items() if layer[:-1].any()
    }
    ends = [*(moment for moment, _ in phases[1:]), changes[-1][0]]
    backwards = [
        (start, end)
        for (start, name), end in zip(phases, ends, strict=False)
        if name == "backward"
    ]
    return Timeline(file, order, unit, layers, backwards, device, before > 0)


class _Plain(pickle.Unpickler):
    """Restricted to the types of a snapshot: dicts, lists, texts and numbers."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"it asks for {module}.{name}, and a snapshot holds plain values alone"
        )
