"""What a traced step is made of, in the order in which the host issued it.

A trace is a list of these, for one rank. Whoever records it knows neither an allocator nor a clock; whoever replays it
knows no model. Streams are numbered from 0, which is the computing one; events (in the device's sense) and blocks of
memory are numbered as they come, and no number is used twice. Bytes are those that were asked for, before an allocator
rounds them.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from fsdptoys.metrics.prediction import Category

COMPUTE_STREAM = 0


class KernelKind(Enum):
    """Which of a device's speeds an operator is bound by."""

    matmul = "matrix products"
    attention = "attention"
    memory = "element-wise"
    """All that is bound by memory bandwidth."""


class Alloc(NamedTuple):
    """A block of device memory is asked for, on the stream that is current."""

    block: int
    bytes: int
    stream: int
    category: Category


class Free(NamedTuple):
    """The last reference to a block is gone."""

    block: int


class RecordStream(NamedTuple):
    """``tensor.record_stream``: when it is freed, a block waits for what the stream has been given by then."""

    block: int
    stream: int


class Kernel(NamedTuple):
    """An operator on the device."""

    name: str
    stream: int
    kind: KernelKind
    flops: float
    """As computed: of causal attention, half the square."""
    bytes: int
    """Read and written."""
    dtype: str
    """Of its largest input, as ``bfloat16``."""


class HostWork(NamedTuple):
    """An operator on host memory; the host stands still for it, unless it is done by worker threads."""

    name: str
    bytes: int
    elements: int
    """Of parameters that an optimizer updates; 0 for any other work."""
    worker: bool


class Transfer(NamedTuple):
    """A copy between host and device."""

    stream: int
    bytes: int
    to_device: bool
    blocking: bool
    """Whether the host waits for its end: not pinned, or not asked to be asynchronous."""


class Collective(NamedTuple):
    """Ranks exchange data."""

    name: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast``, ``all_to_all``, …"""
    stream: int
    bytes: int
    """Of the whole: what is gathered, or is to be scattered or reduced."""
    group_size: int
    group_stride: int
    """Distance between neighbours of the group in the numbering of all ranks: 1 for a shard axis."""
    axis: str
    """``shard``, ``replicate`` or ``world``."""


class RecordEvent(NamedTuple):
    """An event happens when all that the stream has been given so far is done."""

    event: int
    stream: int


class WaitEvent(NamedTuple):
    """What the stream is given from now on comes after the event."""

    event: int
    stream: int


class HostWaitEvent(NamedTuple):
    """The host waits for an event."""

    event: int


class HostWaitStream(NamedTuple):
    """The host waits for a stream, or for all; reading a number from the device is this."""

    stream: int | None


class HostWaitWorkers(NamedTuple):
    """The host waits for its worker threads."""

    works: int
    """So many of the ``HostWork`` events that were theirs must be done, counted from the beginning."""


class Mark(NamedTuple):
    """A phase begins: ``construction``, ``data``, ``forward``, ``backward``, ``optimizer``, ``end``."""

    step: int
    """From 1; 0 for the construction."""
    phase: str


Event = (
    Alloc
    | Free
    | RecordStream
    | Kernel
    | HostWork
    | Transfer
    | Collective
    | RecordEvent
    | WaitEvent
    | HostWaitEvent
    | HostWaitStream
    | HostWaitWorkers
    | Mark
)


@dataclass
class Trace:
    """One rank's construction and steps."""

    events: list[Event]
    streams: dict[int, str] = field(default_factory=dict)
    """Number → what the stream is for, as ``compute``, ``all-gather``."""
    categories: dict[int, Category] = field(default_factory=dict)
    """Blocks whose purpose was known only later than their ``Alloc``; these count."""
    n_layers: int = 0
    """Blocks of the model that was traced."""
    steps: int = 0
    tokens_per_step: int = 0
    """Of this rank."""
    model_flops_per_step: float = 0.0
    """Of this rank, as MFU counts them."""
    host_bytes: int = 0
    """Of host memory that the rank's tensors hold at the end of a step."""
