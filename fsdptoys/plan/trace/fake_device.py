"""A device that exists in name only, so that the real trainer takes every path that it takes on an accelerator.

PyTorch lets one device type be implemented from Python (PrivateUse1). Tensors on it are fake: they have shapes and a
device, but no memory. Its streams and events compute nothing either; they tell a listener in which order they were
used. Collectives go to PyTorch's own fake process group, so that one process is rank 0 of a world of any size.

All of this is process-wide and cannot be undone, so it belongs into a process of its own (``worker``).

PyTorch before 2.9 cannot register such a device from Python. There the device type ``lazy``, which CPU builds know and
nobody implements, stands in; DDP, whose reducer asks a device's guard in C++, cannot be traced with it.
"""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdptoys.device import Device, MemoryStats

DEVICE_NAME = "planned"
"""The device type where the planned one is CUDA: a name that nothing else has."""


class Listener(Protocol):
    """Who is told what streams do."""

    def record_event(self, event: int, stream: int) -> None:
        """An event is recorded on a stream."""

    def wait_event(self, event: int, stream: int) -> None:
        """A stream waits for an event."""

    def host_wait_event(self, event: int) -> None:
        """The host waits for an event."""

    def host_wait_stream(self, stream: int | None) -> None:
        """The host waits for a stream, or for all."""

    def memory(self) -> MemoryStats:
        """Memory of the device as it is now."""


class Stream:
    """Stands for a stream of the device; all of its methods are those of ``torch.cuda.Stream``."""

    _numbers = itertools.count()

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.number = next(Stream._numbers)
        self.priority = priority
        self.device = torch.device(MODULE.name, 0)
        MODULE.add(self)

    @property
    def stream_id(self) -> int:
        """The number that a trace knows this stream by."""
        return self.number

    def wait_stream(self, other: "Stream") -> None:
        """Wait for what the other has been given so far."""
        if other is not self:
            self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        """Wait for an event, if it was ever recorded."""
        if event.number is not None and MODULE.listener is not None:
            MODULE.listener.wait_event(event.number, self.number)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event, a new one by default."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait."""
        if MODULE.listener is not None:
            MODULE.listener.host_wait_stream(self.number)

    def query(self) -> bool:
        """Whether all work is done; nobody knows, so the answer that lets the host go on."""
        return True

    def __enter__(self) -> "Stream":
        self._before = MODULE.current
        MODULE.current = self
        return self

    def __exit__(self, *_: object) -> None:
        MODULE.current = self._before


class Event:
    """Stands for an event of the device."""

    _numbers = itertools.count()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.number: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Happen when all that the stream has been given so far is done."""
        self.number = next(Event._numbers)
        if MODULE.listener is not None:
            MODULE.listener.record_event(self.number, (stream or MODULE.current).number)

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait."""
        (stream or MODULE.current).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait."""
        if self.number is not None and MODULE.listener is not None:
            MODULE.listener.host_wait_event(self.number)

    def query(self) -> bool:
        """Whether it has happened; see ``Stream.query``."""
        return True


class DeviceModule:
    """What PyTorch expects in ``torch.<device type>``, as far as training asks for it."""

    def __init__(self) -> None:
        self.Stream, self.Event = Stream, Event
        self.name = DEVICE_NAME
        self.listener: Listener | None = None
        self.current: Stream
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()

    def streams(self) -> list[Stream]:
        """All that are alive."""
        return list(self._streams)

    def add(self, stream: Stream) -> None:
        """A stream was made."""
        self._streams.add(stream)

    def current_stream(self, device: Any = None) -> Stream:
        """The stream that operators are given to."""
        return self.current

    def default_stream(self, device: Any = None) -> Stream:
        """The computing stream."""
        return self.default

    def start(self, name: str) -> None:
        """Take a name and make the computing stream, whose number is 0."""
        self.name = name
        self.default = self.current = Stream()

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """Give what follows to a stream."""
        before = self.current
        self.current = stream or before
        try:
            yield
        finally:
            self.current = before

    def set_stream(self, stream: Stream) -> None:
        """Give what follows to a stream."""
        self.current = stream

    def synchronize(self, device: Any = None) -> None:
        """Let the host wait for all streams."""
        if self.listener is not None:
            self.listener.host_wait_stream(None)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """There is one device."""
        yield

    def is_available(self) -> bool:
        """It is as available as it will ever be."""
        return True

    def is_initialized(self) -> bool:
        """There is nothing to initialise."""
        return True

    def device_count(self) -> int:
        """One: that of this rank."""
        return 1

    def current_device(self) -> int:
        """The only one."""
        return 0

    def set_device(self, device: Any) -> None:
        """There is one device."""

    def get_device_name(self, device: Any = None) -> str:
        """What it is called."""
        return self.name

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Nothing random is drawn."""
        return torch.empty(16, dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Nothing random is drawn."""

    def manual_seed_all(self, seed: int) -> None:
        """Nothing random is drawn."""

    def is_current_stream_capturing(self) -> bool:
        """No graph is captured."""
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast may choose."""
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False


MODULE = DeviceModule()


class PlannedDevice(Device):
    """The trainer's view of the fake device, or of a CPU whose tensors are fake.

    Args:
        device_type: ``cuda``, ``npu`` or ``cpu``: what is planned for.
        name: what it is called.
        memory_bytes: that it has.
    """

    def __init__(self, device_type: str, name: str, memory_bytes: int) -> None:
        # Not super's, which looks for a device of this machine.
        self.type = torch_device_type(device_type)
        self.torch_device = torch.device("cpu") if device_type == "cpu" else torch.device(self.type, 0)
        self.backend = "fake"
        self._name, self._memory_bytes = name, memory_bytes

    @property
    def name(self) -> str:
        """The name that its maker gave it."""
        return self._name

    @property
    def total_memory_bytes(self) -> int:
        """Memory of the device."""
        return self._memory_bytes

    @property
    def peak_flops(self) -> float | None:
        """Not asked of a device that computes nothing."""
        return None

    def synchronize(self) -> None:
        """Wait for the computing stream."""
        if self.is_accelerator:
            MODULE.current.synchronize()

    def reset_peak_memory(self) -> None:
        """Peaks are found when a trace is replayed."""

    def memory(self) -> MemoryStats:
        """What the listener has counted."""
        assert MODULE.listener is not None
        return MODULE.listener.memory()


def torch_device_type(device_type: str) -> str:
    """What PyTorch calls the device that stands for one of ``cuda``, ``npu`` and ``cpu``."""
    if device_type == "cpu":
        return "cpu"
    if not _registers_devices():
        return "lazy"
    return "npu" if device_type == "npu" else DEVICE_NAME


def install(device_type: str, world_size: int) -> None:
    """Make this process rank 0 of a world of fake devices; once in a process, and for good.

    Args:
        device_type: ``cuda``, ``npu`` or ``cpu``: what is planned for.
        world_size: ranks.
    """
    # Registers the backend: PyTorch's own test helper, which stands in torch 2.7 to 2.13.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    name = torch_device_type(device_type)
    if device_type != "cpu":
        if _registers_devices():
            from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

            _setup_privateuseone_for_python_backend(rename=name, backend_module=MODULE)
        else:
            torch._register_device_module(name, MODULE)
        MODULE.start(name)
        dist.Backend.default_device_backend_map[name] = "fake"
        dist.Backend.backend_capability["fake"].append(name)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def _registers_devices() -> bool:
    from torch.utils import backend_registration

    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
