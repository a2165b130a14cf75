"""Joins a skeleton with the contents of its segments to the trace of a run.

Contents are inserted at the skeleton's notes. A block that both have, such as a gradient that the
contents allocate and FSDP frees, gets the contents' number.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from fsdptoys.metrics.prediction import Category
from fsdptoys.plan.simulator import events
from fsdptoys.plan.simulator.events import (
    COMPUTE_STREAM,
    Alloc,
    Free,
    Kernel,
    KernelKind,
    Kernels,
    Mark,
    Trace,
)
from fsdptoys.plan.trace.exchanges import EXCHANGE
from fsdptoys.plan.trace.op_recorder import FIRST_MATMUL

from .segment import GRADIENT, STAGE, Piece, Segment
from .stand_ins import TOKENS, Note

OFFLOAD = "activation offload"  # Purpose of a stream


@dataclass
class _Instance:
    """A segment in one micro-batch."""

    segment: Segment
    block: int  # Added to numbers of blocks
    event: int  # Added to numbers of device events
    first: int  # Visit with which the forward begins and the backward ends
    pieces: list[Piece]
    # Numbers of blocks that another segment allocates
    handed_on: dict[int, int] = field(default_factory=dict)
    position: int = 0
    is_over: bool = False  # Whether the pass that has begun is over


class Splicer:
    """Inserts the contents of segments, from the embedding to the head, in a skeleton.

    Args:
        workspace_bytes: of a thread's matmuls.
        offloads: whether the segments' saved tensors leave the device.
    """

    def __init__(
        self,
        skeleton: Trace,
        segments: list[Segment],
        workspace_bytes: int,
        offloads: bool,
    ) -> None:
        self.skeleton = skeleton
        self.segments = segments
        self.workspace_bytes = workspace_bytes
        self.offloads = offloads
        self.tokens = max(segment.tokens for segment in segments)
        self.trace = Trace(
            [], dict(skeleton.streams), skeleton.categories, skeleton.host_bytes
        )
        self.add = self.trace.events.append
        self.blocks = 1 + max(
            event.block for event in skeleton.events if isinstance(event, Alloc)
        )
        self.events = 1 + max(
            (e.event for e in skeleton.events if isinstance(e, events.RecordEvent)),
            default=0,
        )
        self.exchange = 1 + max(self.trace.streams, default=0)
        self.trace.streams[self.exchange] = "communication"
        self.same: dict[int, int] = {}  # The skeleton's block → the contents'
        self.next: int | None = None  # Number of the skeleton's next block
        # By segment: the last whose forward has begun, those that wait for their backward, the last
        # that has begun it.
        self.forwards: dict[int, _Instance] = {}
        self.waiting: defaultdict[int, deque[_Instance]] = defaultdict(deque)
        self.backwards: dict[int, _Instance] = {}
        self.multiplied: set[str] = set()  # Threads that have the library's workspace

    def run(self) -> Trace:
        """Return the joined trace."""
        step = 0
        phase = ""
        copying = [
            number
            for number, purpose in self.trace.streams.items()
            if purpose == OFFLOAD
        ]
        event: Any
        for event in self.skeleton.events:
            kind = type(event)
            if kind is Note:
                if phase == "backward" and self._begins_phase(event):
                    self.add(Mark(step, phase))
                self._insert(event)
            elif kind is Alloc:
                if self.next is not None:
                    self.same[event.block], self.next = self.next, None
                else:
                    self.add(event._replace(bytes=self._scaled(event.bytes)))
            elif kind is Free:
                self.add(Free(self.same.get(event.block, event.block)))
            elif kind is Kernel:
                if event.kind is not KernelKind.matmul or event.flops:
                    self.add(event._replace(bytes=self._scaled(event.bytes)))
            elif kind is events.RecordStream:
                self.add(event._replace(block=self.same.get(event.block, event.block)))
            elif kind is events.Messages:
                sizes = (
                    message._replace(bytes=self._scaled(message.bytes))
                    for message in event.messages
                )
                self.add(event._replace(messages=tuple(sizes)))
            elif kind is events.Transfer:
                scaled = self._scaled(event.bytes)
                if (
                    event.stream in copying
                    and not event.to_device
                    and step == 1
                    and phase == "forward"
                ):
                    self.trace.host_bytes += pinned_bytes(scaled) - pinned_bytes(
                        event.bytes
                    )
                self.add(event._replace(bytes=scaled))
            else:
                if kind is Mark:
                    step = event.step
                    phase = event.phase
                    if phase in ("forward", "optimizer"):
                        for instance in self.backwards.values():
                            self._end(instance)
                self.add(event)
        return self.trace

    def _begins_phase(self, note: Note) -> bool:
        """Whether a phase begins: those around the first and last blocks are apart, as their peaks
        are linear."""
        last = len(self.segments) - 1
        return (
            note.kind == "backward"
            and self._over(self.backwards, note)
            and note.segment in (last - 1, 1, 0)
        )

    @staticmethod
    def _over(begun: dict[int, _Instance], note: Note) -> bool:
        instance = begun.get(note.segment)
        return instance is None or instance.is_over

    def _scaled(self, size: int) -> int:
        return size if size % TOKENS else size // TOKENS * self.tokens

    def _insert(self, note: Note) -> None:
        kind = note.kind
        segment = self.segments[note.segment]
        if kind in ("forward", "saved") and self._over(self.forwards, note):
            self._begin(note)
        if kind == "backward" and self._over(self.backwards, note):
            self._turn(note.segment)
        instance = (
            self.forwards if kind in ("forward", "saved", "output") else self.backwards
        )[note.segment]
        if kind in ("forward", "backward"):
            self._advance(instance, STAGE, note.name)
        elif kind == "gradient":
            self._advance(instance, GRADIENT, note.name)
            self.next = instance.block + segment.gradients[note.name]
        elif kind == "saved":
            self.next = instance.block + list(segment.saved)[note.visit]
        elif kind == "output":
            self._end(instance)
            self.waiting[note.segment].append(instance)
            self.next = instance.block + segment.output
        elif note.visit == instance.first:
            self._end(instance)
            # The gradient was sent to another rank.
            if note.segment and note.segment - 1 not in self.forwards:
                self.add(Free(instance.block + segment.input_gradient))
        else:
            stages = (
                i
                for i, piece in enumerate(instance.pieces)
                if i >= instance.position and piece.mark.step == STAGE
            )
            self._issue_until(instance, next(stages, len(instance.pieces)))

    def _begin(self, note: Note) -> None:
        segment = self.segments[note.segment]
        self.forwards[note.segment] = _Instance(
            segment, self.blocks, self.events, note.visit, segment.forward
        )
        self.blocks += segment.blocks + 1
        self.events += segment.device_events + 1

    def _turn(self, number: int) -> None:
        """Begin a segment's backward. The following segment, or another rank, has allocated its
        first gradient."""
        instance = self.backwards[number] = self.waiting[number].popleft()
        instance.pieces = instance.segment.backward
        instance.position = 0
        instance.is_over = False
        if instance.segment.output_gradient and number + 1 in self.backwards:
            after = self.backwards[number + 1]
            gradient = after.segment.input_gradient
            instance.handed_on[instance.segment.output_gradient] = after.handed_on.get(
                gradient, after.block + gradient
            )

    def _end(self, instance: _Instance) -> None:
        self._issue_until(instance, len(instance.pieces))
        instance.is_over = True

    def _advance(self, instance: _Instance, step: int, name: str) -> None:
        """Issue up to the next mark, and from it on if a stage begins there; nothing if it is
        passed."""
        for index in range(instance.position, len(instance.pieces)):
            mark = instance.pieces[index].mark
            if mark.step == step and mark.phase == name:
                self._issue_until(instance, index + (step == STAGE))
                return

    def _issue_until(self, instance: _Instance, index: int) -> None:
        for piece in instance.pieces[instance.position : index]:
            for event in piece.events:
                self._issue(instance, event)
        instance.position = max(instance.position, index)

    def _issue(self, instance: _Instance, event: Any) -> None:
        kind = type(event)
        if kind is Alloc:
            self.add(event._replace(block=instance.block + event.block))
        elif kind is Free:
            if not (self.offloads and event.block in instance.segment.saved):
                block = instance.block + event.block
                self.add(Free(instance.handed_on.get(event.block, block)))
        elif kind is Kernels or kind is Kernel:
            self.add(event)
        elif kind is Mark:
            if event.step == FIRST_MATMUL and event.phase not in self.multiplied:
                self.multiplied.add(event.phase)
                self.blocks += 1
                size = self.workspace_bytes
                block = self.blocks - 1
                self.add(Alloc(block, size, COMPUTE_STREAM, Category.temporary))
        else:
            if getattr(event, "stream", COMPUTE_STREAM) == EXCHANGE:
                event = event._replace(stream=self.exchange)
            if isinstance(event, (events.RecordEvent, events.WaitEvent)):
                event = event._replace(event=instance.event + event.event)
            elif isinstance(event, events.RecordStream):
                event = event._replace(block=instance.block + event.block)
            self.add(event)


def pinned_bytes(size: int) -> int:
    """Bytes that PyTorch's pinned-memory allocator takes for a request: the next power of two."""
    return 1 << max(0, size - 1).bit_length()
