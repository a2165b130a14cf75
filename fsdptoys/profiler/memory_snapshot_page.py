"""A memory snapshot as one HTML page without network or scripts.

PyTorch's interactive timeline (``torch.cuda._memory_viz.trace_plot``) loads MemoryViz.js and d3
from the network, and no wheel ships them. This page shows the parts of PyTorch's visualizer that
need no script: its summary of segments, and its flame graph as a tree that unfolds; and, computed
here, a timeline and the stacks that held the memory at its peak.

Sizes are requested sizes, before the allocator rounds them.

Source of the format: https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
"""

import base64
import html
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fsdptoys.utils.figure_png import render_png
from fsdptoys.utils.figures import Axis, Picture, Series, Shape, thin
from fsdptoys.utils.text import fitting_unit, size_text

POINTS = 2000  # Points of the timeline
OUT_OF_MEMORY_LOOK = 6  # A red cross
HOLDERS = 30  # Stacks in the table of the peak
LEAST_SHARE = 0.002  # Smallest share of a branch in the tree
# Action of an event → sign of its size
SIGNS = {
    "alloc": 1,
    "free_completed": -1,
    "oom": 0,
}

Frames = list[dict[str, Any]]
UNKNOWN = "allocated before the history began"


@dataclass
class Holder:
    """Live tensors of one call stack."""

    frames: Frames
    live_bytes: int = 0
    tensors: int = 0


@dataclass
class Timeline:
    """Live bytes after each event of a device's history."""

    live_bytes: list[int]  # The first value is from before the first event
    out_of_memory: list[int]  # Indices into ``live_bytes`` of the events that failed
    peak_index: int
    holders: list[Holder]  # Holders of the memory at the peak, the largest first


@dataclass
class Branch:
    """One frame of the tree and its callees."""

    total_bytes: int = 0
    calls: dict[str, "Branch"] = field(default_factory=dict)


def read_timeline(snapshot: dict[str, Any], device_index: int) -> Timeline:
    """Walk a device's history in ``torch.cuda.memory._snapshot()`` back from the final live blocks,
    then forward."""
    traces = snapshot.get("device_traces", [])
    events = traces[device_index] if device_index < len(traces) else []
    events = [event for event in events if event["action"] in SIGNS]
    live = dict(_live_blocks(snapshot, device_index))

    totals = [sum(size for size, _ in live.values())]
    for event in reversed(events):
        totals.append(totals[-1] - SIGNS[event["action"]] * int(event["size"]))
    totals.reverse()
    peak = max(range(len(totals)), key=lambda index: totals[index])

    # A free has only its own stack; that of its allocation is in the history if it goes back far
    # enough.
    allocated_by: dict[int, Frames] = {}
    owners: list[Frames] = []
    for event in events:
        if event["action"] == "alloc":
            allocated_by[event["addr"]] = event.get("frames", [])
        owners.append(
            allocated_by.pop(event["addr"], [])
            if event["action"] == "free_completed"
            else []
        )
    for index in range(len(events) - 1, peak - 1, -1):
        event = events[index]
        if event["action"] == "alloc":
            live.pop(event["addr"], None)
        elif event["action"] == "free_completed":
            live[event["addr"]] = (event["size"], owners[index])

    holders: dict[tuple[str, ...], Holder] = {}
    for size, frames in live.values():
        holder = holders.setdefault(tuple(map(_frame, frames)), Holder(frames))
        holder.live_bytes += size
        holder.tensors += 1
    return Timeline(
        live_bytes=totals,
        out_of_memory=[
            index + 1 for index, event in enumerate(events) if event["action"] == "oom"
        ],
        peak_index=peak,
        holders=sorted(holders.values(), key=lambda holder: -holder.live_bytes),
    )


def render_snapshot(
    snapshot: dict[str, Any],
    device_index: int,
    title: str,
    pickle_name: str,
    interactive_name: str,
) -> str:
    """The page of ``torch.cuda.memory._snapshot()``, with links to the pickle and PyTorch's
    timeline in its folder."""
    own = {
        **snapshot,
        "segments": [
            seg for seg in snapshot["segments"] if seg.get("device", 0) == device_index
        ],
    }
    timeline = read_timeline(snapshot, device_index)
    reserved = sum(segment["total_size"] for segment in own["segments"])
    peak = timeline.live_bytes[timeline.peak_index]
    now = timeline.live_bytes[-1]
    segments = html.escape(str(torch.cuda._memory_viz.segsum(own)))
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
            f"<style>{_STYLE}</style></head>",
            f"<body><h1>Device memory: {html.escape(title)}</h1>",
            (
                f"<p>Live tensors: {size_text(now)} at the end, {size_text(peak)} at the peak of "
                f"the history. Reserved by the allocator at the end: {size_text(reserved)}. Sizes "
                "are requested sizes.</p>"
            ),
            _image(timeline_picture(timeline)),
            f"<h2>Who held the memory at the peak</h2>{_holders_table(timeline, peak)}",
            "<h2>Who holds the memory at the end, from the outermost call inwards</h2>",
            _tree(own),
            f"<h2>Segments of the allocator at the end</h2><pre>{segments}</pre>",
            "<p>The same history, to zoom and point into: "
            f'<a href="{html.escape(interactive_name)}">{html.escape(interactive_name)}</a> '
            "loads PyTorch's scripts over the network; or drop "
            f"<code>{html.escape(pickle_name)}</code> on pytorch.org/memory_viz.</p>",
            "</body></html>",
            "",
        ]
    )


def _live_blocks(
    snapshot: dict[str, Any], device_index: int
) -> Iterable[tuple[int, tuple[int, Frames]]]:
    for segment in snapshot["segments"]:
        if segment.get("device", 0) != device_index:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            # A block that waits for another stream is not free yet
            if block["state"] != "inactive":
                size = block.get("requested_size", block["size"])
                yield block.get("address", address), (size, block.get("frames", []))
            address += block["size"]


def _frame(frame: dict[str, Any]) -> str:
    return f"{frame['filename']}:{frame['line']}:{frame['name']}"


def _site(frames: Frames) -> str:
    """The innermost frame outside PyTorch."""
    if not frames:
        return UNKNOWN
    outside = [
        frame
        for frame in frames
        if "/torch/" not in frame["filename"] and frame["filename"] != "??"
    ]
    frame = (outside or frames)[0]
    return f"{frame['filename'].rsplit('/', 1)[-1]}:{frame['line']} {frame['name']}"


def timeline_picture(timeline: Timeline) -> Picture:
    """Describe the live bytes, with a cross where memory ran out."""
    unit, unit_bytes = fitting_unit(max(timeline.live_bytes))
    sizes = np.array(timeline.live_bytes) / unit_bytes
    x, (y,), window = thin(np.arange(len(sizes)), sizes, most=POINTS)
    failures = timeline.out_of_memory
    crosses = Series(
        "memory ran out", Shape.points, failures, sizes[failures], OUT_OF_MEMORY_LOOK
    )
    return Picture(
        "timeline",
        f"Live bytes after each of {len(sizes) - 1:,} events",
        [],
        "Live bytes after each event.",
        Axis("events"),
        Axis("live tensors", unit, from_zero=True),
        (
            Series("live tensors", Shape.area, x, y, 0, window=window),
            *([crosses] if failures else []),
        ),
    )


def _image(picture: Picture) -> str:
    """Embed a PNG."""
    data = base64.b64encode(render_png(picture)).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{html.escape(picture.alt)}">'


def _holders_table(timeline: Timeline, peak: int) -> str:
    entries = []
    for holder in timeline.holders[:HOLDERS]:
        site = _site(holder.frames)
        stack = "\n".join(map(_frame, holder.frames)) or UNKNOWN
        where = (
            f"<details><summary>{html.escape(site)}</summary>"
            f"<pre>{html.escape(stack)}</pre></details>"
        )
        entries.append((holder.live_bytes, holder.tensors, where))
    if left_out := timeline.holders[HOLDERS:]:
        rest = sum(holder.live_bytes for holder in left_out)
        tensors = sum(holder.tensors for holder in left_out)
        entries.append((rest, tensors, f"{len(left_out):,} other stacks"))
    rows = "".join(
        f"<tr><td>{size_text(size)}</td><td>{size / max(peak, 1):.1%}</td><td>{tensors:,}</td>"
        f"<td>{where}</td></tr>"
        for size, tensors, where in entries
    )
    return (
        "<table><tr><th>bytes</th><th>share</th><th>tensors</th><th>allocated "
        f"in</th></tr>{rows}</table>"
    )


def _tree(snapshot: dict[str, Any]) -> str:
    """The data of PyTorch's flame graph as a tree of stacks."""
    lines = torch.cuda._memory_viz.memory(snapshot, format_flamegraph=str)
    root = Branch()
    for line in lines.splitlines():
        stack, size = line.rsplit(" ", 1)
        frames = stack.split(";")
        if frames[1] == "inactive" or frames[-1] == "<gaps>":
            continue
        branch = root
        for name in (*frames[:1], *frames[2:]):
            branch.total_bytes += int(size)
            branch = branch.calls.setdefault(name, Branch())
        branch.total_bytes += int(size)
    return (
        _unfold(root, max(1, round(root.total_bytes * LEAST_SHARE)))
        or "<p>Nothing is live.</p>"
    )


def _unfold(branch: Branch, least_bytes: int) -> str:
    parts = []
    for name, inner in sorted(
        branch.calls.items(), key=lambda item: -item[1].total_bytes
    ):
        if inner.total_bytes < least_bytes:
            continue
        names = [name]
        while len(inner.calls) == 1:
            called, only = next(iter(inner.calls.items()))
            if only.total_bytes < inner.total_bytes:  # the caller holds memory itself
                break
            names.append(called)
            inner = only
        label = f"{size_text(inner.total_bytes)} {html.escape(' › '.join(names))}"
        below = _unfold(inner, least_bytes)
        parts.append(
            f"<details open><summary>{label}</summary>{below}</details>"
            if below
            else f"<div>{label}</div>"
        )
    return "".join(parts)


_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}"
    "td,th{padding:2px 12px 2px 0;text-align:left;vertical-align:top}"
    "pre{overflow:auto;font-size:12px}img{width:100%}details,div{margin-left:1.2em}"
    "td details{margin-left:0}summary{cursor:pointer}"
)
