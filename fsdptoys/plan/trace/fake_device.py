"""An accelerator without memory or kernels, on which the real trainer takes all of its accelerator
paths.

PyTorch lets Python implement one device type (PrivateUse1). Its tensors are fake; its streams and
events only report their use to a listener; collectives go to PyTorch's fake process group. All of
this is process-wide and permanent: it needs a process of its own (``tracer``).

PyTorch before 2.9 cannot register such a device from Python. There the device type ``lazy`` stands
in, which CPU builds know without an implementation; DDP, whose reducer asks a device's guard in
C++, cannot be traced with it.
"""

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist

from fsdptoys.device import Device, MemoryStats
from fsdptoys.plan.simulator import events as simulated

PURPOSES = {
    "all_gather_copy_in_stream": "all-gather copy-in",
    "_pre_unshard_stream": "all-gather copy-in",
    "all_gather_stream": "all-gather",
    "_unshard_stream": "all-gather",
    "reduce_scatter_stream": "reduce-scatter",
    "_post_backward_stream": "reduce-scatter",
    "all_reduce_stream": "all-reduce",
    "_all_reduce_stream": "all-reduce",
    "_load_stream": "load",
    "_store_stream": "store",
    "_stream": "activation offload",
}
"""Attribute that holds a stream, in PyTorch's FSDP2, FSDP1 and here → its purpose."""

# Device type that stands for CUDA: a name that nothing else has
DEVICE_NAME = "planned"


@contextmanager
def replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes, each given by owner, name and value."""
    with ExitStack() as stack:
        for replacement in replacements:
            stack.enter_context(mock.patch.object(*replacement))
        yield


class Listener(Protocol):
    """Receives the use of streams, events and worker threads, and counts the device's memory
    (``OpRecorder``)."""

    memory: Callable[[], MemoryStats]
    in_worker: bool
    worker_jobs: int

    def add(self, event: simulated.Event) -> None:
        """Record an event of the trace."""


class Stream:
    """A stream with the methods of ``torch.cuda.Stream``."""

    _numbers = itertools.count()
    query = staticmethod(lambda: True)  # lets the host continue
    # No CUDA graphs; read by torch 2.15, like the next two
    is_capturing = staticmethod(lambda: False)
    device_index = 0
    device_type = 1  # CUDA's number, an argument of an operator that does nothing here

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.number = self.stream_id = next(Stream._numbers)
        self.priority = priority
        self.device = torch.device(MODULE.name, 0)
        MODULE.live_streams.add(self)

    def wait_stream(self, other: "Stream") -> None:
        """Wait for the other stream's work so far."""
        if other is not self:
            self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        """Wait for an event, if it was ever recorded."""
        if event.number is not None:
            MODULE.report(simulated.WaitEvent(event.number, self.number))

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event, a new one by default."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait."""
        MODULE.report(simulated.HostWaitStream(self.number))

    def __enter__(self) -> "Stream":
        self._before = MODULE.current
        MODULE.current = self
        return self

    def __exit__(self, *_: object) -> None:
        MODULE.current = self._before


class Event:
    """An event with the methods of ``torch.cuda.Event``."""

    _numbers = itertools.count()
    query = staticmethod(lambda: True)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Record the event on a stream."""
        self.number = next(Event._numbers)
        MODULE.report(
            simulated.RecordEvent(self.number, (stream or MODULE.current).number)
        )

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait."""
        (stream or MODULE.current).wait_event(self)

    def elapsed_time(self, end: "Event") -> float:
        """A placeholder for the milliseconds between two events."""
        return 1.0

    def synchronize(self) -> None:
        """Let the host wait."""
        if self.number is not None:
            MODULE.report(simulated.HostWaitEvent(self.number))


class DeviceModule:
    """The part of ``torch.<device type>`` that training uses."""

    is_available = is_initialized = staticmethod(lambda: True)
    is_current_stream_capturing = _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = set_rng_state = manual_seed_all = staticmethod(lambda *_, **__: None)
    get_rng_state = staticmethod(lambda device=None: torch.empty(16, dtype=torch.uint8))
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])
    device = staticmethod(lambda device: nullcontext())  # there is one

    def __init__(self) -> None:
        self.Stream = Stream
        self.Event = Event
        self.name = DEVICE_NAME
        self.listener: Listener | None = None
        self.default: Stream
        self.current: Stream
        self.live_streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.current_stream = lambda device=None: self.current
        self.default_stream = lambda device=None: self.default
        self.synchronize = lambda device=None: self.report(
            simulated.HostWaitStream(None)
        )
        self.get_device_name = lambda device=None: self.name

    def report(self, event: simulated.Event) -> None:
        """Pass an event to the listener, if there is one."""
        if self.listener is not None:
            self.listener.add(event)

    def set_stream(self, stream: Stream) -> None:
        """Make a stream current."""
        self.current = stream

    def stream(self, stream: Stream | None) -> AbstractContextManager[None]:
        """Make a stream current within a context."""
        return replaced((self, "current", stream or self.current))


MODULE = DeviceModule()


def stream_purposes() -> dict[int, str]:
    """Purposes of the live streams, by the attributes that hold them."""
    purposes = {simulated.COMPUTE_STREAM: "compute"}
    streams = [
        stream
        for stream in MODULE.live_streams
        if stream.number != simulated.COMPUTE_STREAM
    ]
    for holder in gc.get_referrers(*streams) if streams else []:
        attributes = (
            holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        )
        for name, value in list(attributes.items()):
            if isinstance(value, Stream) and name in PURPOSES:
                purposes.setdefault(value.number, PURPOSES[name])
    return purposes


class PlannedDevice(Device):
    """The trainer's view of the fake device, or of a CPU with fake tensors."""

    name = ""
    total_memory_bytes = 0
    peak_flops = None  # the device computes nothing

    def __init__(self, device_type: str, name: str, memory_bytes: int) -> None:
        # Not super().__init__, which looks for a device of this machine.
        self.type = torch_device_type(device_type)
        self.torch_device = (
            torch.device("cpu") if device_type == "cpu" else torch.device(self.type, 0)
        )
        self.backend = "fake"
        self.name = name
        self.total_memory_bytes = memory_bytes

    def synchronize(self) -> None:
        """Wait for the compute stream."""
        if self.is_accelerator:
            MODULE.current.synchronize()

    def reset_peak_memory(self) -> None:
        """Do nothing: a replay finds the peaks."""

    counts_allocations = False  # fake tensors have none

    def memory(self) -> MemoryStats | None:
        """Return the listener's count; None for a CPU."""
        if not self.is_accelerator:
            return None
        assert MODULE.listener is not None
        return MODULE.listener.memory()


def torch_device_type(device_type: str) -> str:
    """PyTorch's device type of the stand-in for ``cuda``, ``npu`` or ``cpu``."""
    if device_type == "cpu":
        return "cpu"
    if not registers_devices():
        return "lazy"
    return "npu" if device_type == "npu" else DEVICE_NAME


def install(device_type: str, world_size: int, rank: int = 0) -> None:
    """Make this process a rank of a world of fake devices; permanent, except the number of
    ranks."""
    # Importing PyTorch's test helper (torch 2.7 to 2.13) registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    name = torch_device_type(device_type)
    if dist.is_initialized():
        dist.destroy_process_group()
        _forget_meshes()
    elif device_type != "cpu":
        if registers_devices():
            from torch.utils.backend_registration import (
                _setup_privateuseone_for_python_backend,
            )

            _setup_privateuseone_for_python_backend(rename=name, backend_module=MODULE)
        else:
            torch._register_device_module(name, MODULE)
        MODULE.name = name
        MODULE.default = MODULE.current = Stream()  # the compute stream, number 0
        dist.Backend.default_device_backend_map[name] = "fake"
        dist.Backend.backend_capability["fake"].append(name)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def _forget_meshes() -> None:
    """Clear DTensor's caches, which would put meshes with the groups of another world in place of
    equal ones.

    Private API; tried with torch 2.7 to 2.15.
    """
    from torch.distributed.tensor import DTensor, debug

    if hasattr(debug, "_clear_sharding_prop_cache"):  # from torch 2.8 on
        debug._clear_sharding_prop_cache()
    else:
        propagate: Any = (
            DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
        )
        propagate.cache.cache_clear()


def registers_devices() -> bool:
    """Whether Python can register a device type."""
    from torch.utils import backend_registration

    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
