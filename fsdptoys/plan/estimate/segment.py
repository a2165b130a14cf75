"""The recorded contents of a segment of a model: embedding, block, or norm and head with the
loss."""

from dataclasses import dataclass
from typing import NamedTuple

from fsdptoys.plan.simulator.events import (
    Alloc,
    Event,
    Free,
    Kernel,
    Kernels,
    Mark,
)

from .stand_ins import Layout

# ``Mark.step`` where a stage begins, and where the gradient of a parameter is final
STAGE = -4
GRADIENT = -1


class Piece(NamedTuple):
    """Events from a mark to the next, with blocks numbered within the segment.

    Marks of step ``FIRST_MATMUL`` among them are where a thread needs the library's workspace.
    """

    mark: Mark
    events: list[Event]


@dataclass(frozen=True)
class Segment:
    """A unit in forward and backward. It frees the gradient of its output, but does not allocate
    it."""

    forward: list[Piece]
    backward: list[Piece]
    blocks: int  # Largest number of a block
    device_events: int  # Largest number of an event on a stream
    input: int  # Block of the input; 0 if none
    output: int
    output_gradient: int
    input_gradient: int
    saved: dict[int, int]
    """Block → bytes of a tensor that checkpointing saves besides the input, if large enough for
    activation offload."""
    # Parameter → block of its gradient, which outlives the backward
    gradients: dict[str, int]
    views: frozenset[str]  # Parameters whose gradient is a view
    tokens: int  # Of the input

    def layout(self, offloaded: bool, ties: bool) -> Layout:
        """The skeleton's description, with kept tensors if they are offloaded."""
        stages = tuple(
            piece.mark.phase for piece in self.forward if piece.mark.step == STAGE
        )
        if stages[0]:
            stages = tuple(filter(None, stages))  # no module contains the others
        marks = (piece.mark for piece in self.backward)
        # The kind of a gradient matters where autograd adds another one.
        gradients = (
            (mark.phase, ties and mark.phase in self.views)
            for mark in marks
            if mark.step == GRADIENT
        )
        saved = (size // self.tokens for size in self.saved.values())
        return Layout(stages, tuple(gradients), tuple(saved) if offloaded else ())


def join_kernels(recorded: list[Event]) -> list[Event]:
    """Events with the kernels of each stretch at its end, as one event, which makes replays a third
    shorter."""
    joined: list[Event] = []
    kernels: list[Kernel] = []
    for event in [*recorded, None]:
        if isinstance(event, Kernel):
            kernels.append(event)
            continue
        if kernels and not isinstance(event, (Alloc, Free)):
            joined.append(Kernels(tuple(kernels)))
            kernels = []
        if event is not None:
            joined.append(event)
    return joined
