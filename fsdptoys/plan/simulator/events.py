"""Events of a traced step of one rank, in the order in which the host issues them.

Streams are numbered from 0, the compute stream; device events and memory blocks have increasing
numbers that are never reused. Bytes are those requested, before an allocator rounds them.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from fsdptoys.metrics.prediction import Category

COMPUTE_STREAM = 0


class KernelKind(Enum):
    """Device speed that bounds an operator."""

    # A clock counts by kind at every kernel: an Enum's own hash takes a call
    __hash__ = object.__hash__

    matmul = "matrix products"
    attention = "attention"
    memory = "element-wise"  # Bound by memory bandwidth


class Alloc(NamedTuple):
    """A block of device memory is requested on the current stream."""

    block: int
    bytes: int
    stream: int
    category: Category


class Free(NamedTuple):
    """The last reference to a block is gone."""

    block: int


class RecordStream(NamedTuple):
    """``tensor.record_stream``: once freed, the block waits for the work that the stream has until
    then."""

    block: int
    stream: int


class Kernel(NamedTuple):
    """An operator on the device."""

    name: str
    stream: int
    kind: KernelKind
    flops: float  # As computed: for causal attention half the square
    bytes: int
    dtype: str  # Dtype of its largest input, such as ``bfloat16``
    # Backend of attention: a key of a profile's ``attention_backends``
    attention: str = ""


class Kernels(NamedTuple):
    """Operators one after the other on the compute stream, as if nothing came between them."""

    kernels: tuple[Kernel, ...]


class HostWork(NamedTuple):
    """An operator on host memory; it blocks the host unless worker threads run it."""

    name: str
    bytes: int
    elements: int  # Elements of parameters that an optimizer updates; 0 for other work
    worker: bool


class Transfer(NamedTuple):
    """A copy between host and device."""

    stream: int
    bytes: int
    to_device: bool
    # Whether the host waits for its end: not pinned, or not asynchronous
    blocking: bool


class Collective(NamedTuple):
    """A collective among ranks."""

    # ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast``, ``all_to_all``, …
    name: str
    stream: int
    bytes: int  # The full buffer to gather, scatter or reduce
    group_size: int
    # Distance between the group's neighbors in the global rank order: 1 for a shard axis
    group_stride: int
    axis: str  # ``shard``, ``replicate``, ``efsdp``, ``cp``, ``tp``, ``ep``, ``pp`` or ``world``


class Message(NamedTuple):
    """A tensor sent to, or received from, another rank of a group."""

    peer: int  # Rank in the group
    bytes: int
    sends: bool


class Messages(NamedTuple):
    """Messages issued together; none is on its way before both of its ranks have reached it."""

    stream: int
    messages: tuple[Message, ...]
    rank: int  # This rank in the group
    group_size: int
    group_stride: int  # As of a ``Collective``
    axis: str


class RecordEvent(NamedTuple):
    """An event completes when the stream's work so far is done."""

    event: int
    stream: int


class WaitEvent(NamedTuple):
    """Later work of the stream waits for the event."""

    event: int
    stream: int


class HostWaitEvent(NamedTuple):
    """The host waits for an event."""

    event: int


class HostWaitStream(NamedTuple):
    """The host waits for a stream, or for all (None); reading a number from the device does
    this."""

    stream: int | None


class HostWaitWorkers(NamedTuple):
    """The host waits for its worker threads."""

    works: int
    """Number of the workers' ``HostWork`` events, counted from the beginning, that must be done."""


class Mark(NamedTuple):
    """Start of a phase: ``construction``, ``data``, ``forward``, ``backward``, ``optimizer``,
    ``end``."""

    step: int  # From 1; 0 for the construction
    phase: str


Wait = RecordEvent | WaitEvent | HostWaitEvent | HostWaitStream | HostWaitWorkers
Event = (
    Alloc
    | Free
    | RecordStream
    | Kernel
    | Kernels
    | HostWork
    | Transfer
    | Collective
    | Messages
    | Wait
    | Mark
)


@dataclass
class Trace:
    """Construction and steps of one rank."""

    events: list[Event]
    streams: dict[int, str] = field(default_factory=dict)
    """Number → purpose of the stream, such as ``compute`` or ``all-gather``."""
    categories: dict[int, Category] = field(default_factory=dict)
    """Blocks whose purpose became known after their ``Alloc``, which this overrides."""
    host_bytes: int = 0  # Host memory of the rank's tensors at the end of a step
