"""Records a program over fake tensors as the trace of a device.

PyTorch shows every operator of FSDP, autograd or an optimizer to a dispatch mode, below autograd
and above the fake tensors. Memory is followed by storage (``storages``); streams and events report
themselves (``fake_device``). Not covered: tensors that a kernel of this project allocates without
the dispatcher; numbers read from tensors are not real.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptoys.device.profile import AttentionKind
from fsdptoys.metrics.prediction import Category
from fsdptoys.plan.simulator import events as simulated
from fsdptoys.plan.simulator.events import COMPUTE_STREAM, KernelKind, Mark, Trace
from fsdptoys.profiler.dispatch import (
    arguments_of,
    bind_arguments,
    dtype_name,
    tensors_in,
)

from .exchanges import Exchanges
from .fake_device import MODULE, replaced, stream_purposes
from .op_costs import (
    COPIES,
    TRAFFIC,
    cost_of,
    has_no_kernel,
    scratch_bytes,
    touched_bytes,
    traffic,
    updates_parameters,
)
from .storages import Storage, Storages

FIRST_MATMUL = -2
"""``Mark.step`` before a thread's first matmul on the meta device; the phase is ``forward``'s or
not."""
DEVICE = torch.ops.prim.device.default  # Asked everywhere in C++
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class OpRecorder(TorchDispatchMode):
    """Writes a trace; enter ``watch`` within a ``FakeTensorMode``.

    With the device type ``meta`` it records parts of a program on meta tensors, in a process that
    stays usable.
    """

    def __init__(
        self, device_type: str, attention: AttentionKind, workspace_bytes: int = 0
    ) -> None:
        super().__init__()
        self.trace = Trace(events=[])
        self.device_type = device_type
        self._shapes_only = "" if device_type == "meta" else "meta"
        """Device type of tensors that no device computes."""
        self.objects: Callable[[], Iterable[tuple[Category, Tensor]]] = tuple
        """Returns tensors of known purpose; called at the start and end of a step, and before the
        optimizer step."""
        self.in_worker = False  # Whether the current work belongs to a worker thread
        self.worker_jobs = 0  # ``HostWork`` events of worker threads so far
        self._attention = attention
        self._workspace_bytes = workspace_bytes
        self._multiplied: set[tuple[bool, int]] = set()
        self.storages = Storages(device_type, self.trace.events, self.stream)
        self._recording = True
        self._silent = False
        self._handlers: dict[Any, Handler] = {}
        self._described_streams: set[int] | None = None
        """Streams that were live when their purposes were looked up."""
        self.exchanges = Exchanges(device_type, self.storages, self.add, self.stream)
        self.memory = self.storages.memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Skip the guards that PyTorch (from 2.9 on) puts around every dispatch against its
        compiler."""
        return False

    # Called by programs

    def mark(self, step: int, phase: str) -> None:
        """Start a phase."""
        self.exchanges.wait()
        self.storages.begin_phase(phase)
        # In other phases FSDP1 shows full parameters.
        if phase in ("data", "optimizer", "end"):
            for category, tensor in self.objects():
                self.storages.categorize(tensor, category)
        if phase == "end":
            self.trace.host_bytes = self.storages.host_bytes
            live = {stream.number for stream in MODULE.live_streams}
            if self._described_streams is None or live - self._described_streams:
                # Visits every object of the process.
                self._described_streams = live
                self.trace.streams = stream_purposes()
            self.trace.streams |= dict.fromkeys(self.exchanges.streams, "communication")
        self.add(Mark(step, phase))

    def finish(self) -> Trace:
        """Stop recording and return the trace up to the last mark."""
        self._recording = self.storages.recording = False
        events = self.trace.events
        last = max(
            (index for index, event in enumerate(events) if isinstance(event, Mark)),
            default=-1,
        )
        del events[last + 1 :]
        self.storages.finish(self.trace)
        return self.trace

    # Reports of the fake device and of worker threads

    def add(self, event: simulated.Event) -> None:
        """Append an event to the trace."""
        if self._recording:
            self.trace.events.append(event)

    # Operators

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (
            func is DEVICE
            and type(args[0]) is FakeTensor
            and not args[0].fake_mode.in_kernel_invocation
        ):
            return args[0].fake_device
        if DTensor in types:
            return NotImplemented
        if self._silent or not self._recording:
            return func(*args, **(kwargs or {}))
        if func not in self._handlers:
            self._handlers[func] = self._handler(func)
        return self._handlers[func](func, args, kwargs or {})

    def _handler(self, func: Any) -> Handler:
        name = func._schema.name
        if func.namespace == "c10d":
            return self.exchanges.answer
        if func.namespace in ("prim", "profiler"):
            return lambda func, args, kwargs: func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._read_number
        if func.is_view or has_no_kernel(name):
            return self._without_kernel
        if name == "aten::_pin_memory":
            return self._pin
        if name in COPIES:
            return self._copy
        if func is torch.ops.aten.add.Tensor:
            return self._sum(self._operator(func))
        return self._operator(func)

    def _without_kernel(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self.storages.see(tensor).pinned |= bool(kwargs.get("pin_memory"))
        return result

    def _operator(self, func: Any) -> Handler:
        name = func._schema.name
        arguments = arguments_of(func)
        mutates = name in TRAFFIC or any(argument.writes for argument in arguments)
        here = self.device_type

        def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = func(*args, **kwargs)
            outputs = list(tensors_in(result))
            if any(tensor.device.type == self._shapes_only for tensor in outputs):
                return result
            inputs = [
                (argument, tensor)
                for argument, value in bind_arguments(arguments, args, kwargs)
                for tensor in tensors_in(value)
            ]
            input_keys = {tensor.untyped_storage()._cdata for _, tensor in inputs}
            fresh = [
                tensor
                for tensor in outputs
                if tensor.untyped_storage()._cdata not in input_keys
            ]
            storages = [self.storages.see(tensor) for tensor in outputs]
            if not fresh and not mutates:
                return result  # a view by another name
            if all(
                tensor.device.type != here
                for tensor in [*outputs, *(tensor for _, tensor in inputs)]
            ):
                for storage in storages:
                    storage.pinned |= bool(kwargs.get("pin_memory"))
                self._host_work(
                    name,
                    traffic(name, args, inputs, fresh),
                    updates_parameters(name, args),
                )
                return result
            cost = cost_of(func, args, kwargs, result, inputs, fresh)
            self.storages.scratch(scratch_bytes(name, args, self._attention))
            if cost.kind is KernelKind.matmul:
                self._take_workspace()
            self.add(simulated.Kernel(name, self.stream(), *cost))
            if name in ("fsdp::chunk_cat", "aten::_chunk_cat"):
                for _, tensor in inputs:
                    self.storages.categorize(tensor, Category.reduction_buffers)
            return result

        return handle

    def _sum(self, handle: Handler) -> Handler:
        """The handler of additions, some of which are autograd's own.

        Autograd adds gradients in place if it holds the last reference. For tensors of Python
        classes, such as fake ones, it adds out of place, which takes memory that a real run does
        not take. It adds after a node of the graph has run, while that node is still current; the
        few nodes that add by themselves are not distinguished. A view holds a second reference, to
        its base.
        """
        in_place = torch.ops.aten.add_.Tensor
        handle_in_place = self._operator(in_place)

        def handle_sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            node = (
                None if torch.is_grad_enabled() else torch._C._current_autograd_node()
            )
            if (
                node is None
                or not isinstance(args[1], Tensor)
                or args[0].shape != args[1].shape
            ):
                return handle(func, args, kwargs)
            if node.name() == "torch::autograd::AccumulateGrad":
                return handle_in_place(in_place, args, kwargs)
            peak = self.memory().peak_bytes
            events = len(self.trace.events)
            result = handle(func, args, kwargs)
            if (
                self._recording
                and not args[0]._is_view()
                and result.dtype == args[0].dtype
            ):
                self.storages.mark_sum(args[0], result, events, peak)
            return result

        return handle_sum

    def _copy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        name = func._schema.name
        here = self.device_type
        asynchronous = kwargs.get("non_blocking", False)
        if name == "aten::_to_copy":
            pairs = [(result, args[0])]
        else:
            pairs = list(zip(tensors_in(args[0]), tensors_in(args[1]), strict=True))
            asynchronous = args[2] if len(args) > 2 else asynchronous
        within = 0
        for target, source in pairs:
            if self._shapes_only in (target.device.type, source.device.type):
                return result
            into = self.storages.see(target)
            onto_device = target.device.type == here
            from_device = source.device.type == here
            if onto_device == from_device:
                within += touched_bytes(target) + touched_bytes(source)
                continue
            if name == "aten::_to_copy" and asynchronous and from_device:
                # ``Tensor.to`` pins host memory for an asynchronous copy
                into.pinned = True
            host = into if from_device else self.storages.find(source)
            waits = not (asynchronous and host is not None and host.pinned)
            size = touched_bytes(target if onto_device else source)
            self.add(simulated.Transfer(self.stream(), size, onto_device, waits))
        if within and pairs[0][0].device.type == here:
            kind = KernelKind.memory
            dtype = dtype_name(pairs[0][1])
            self.add(simulated.Kernel(name, self.stream(), kind, 0.0, within, dtype))
        elif within:
            self._host_work(name, within, 0)
        return result

    def _pin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pinned = torch.empty_like(args[0])  # fake tensors have no pinned memory
        self.storages.see(pinned).pinned = True
        self._host_work(func._schema.name, 2 * touched_bytes(pinned), 0)
        return pinned

    def _read_number(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        tensor = args[0]
        if not isinstance(tensor, FakeTensor):
            return func(*args, **kwargs)
        return (
            tensor.constant.item()
            if tensor.constant is not None
            else self._number(tensor)
        )

    def _number(self, tensor: Tensor) -> Any:
        """A placeholder for a real number: 0 from the device, as for norms and losses.

        From the host it is 1, since optimizers divide by values derived from their step counters.
        """
        kind: type = (
            bool
            if tensor.dtype is torch.bool
            else float
            if tensor.is_floating_point()
            else int
        )
        if tensor.device.type != self.device_type or self.device_type == "cpu":
            return kind(1)
        self.add(simulated.HostWaitStream(self.stream()))
        return kind(0)

    def _numbers(self, tensor: Tensor) -> Any:
        """``Tensor.tolist`` with zeros only: sums over ranks, of losses and of votes to stop."""
        value = self._number(tensor) * 0
        for size in reversed(tensor.shape):
            value = [value] * size
        return value

    # Events

    def _host_work(self, name: str, size: int, elements: int) -> None:
        self.add(simulated.HostWork(name, size, elements, self.in_worker))
        self.worker_jobs += self.in_worker

    def _take_workspace(self) -> None:
        """Allocate the library's workspace for a thread's first matmul on a stream; the backward
        has its own thread."""
        user = (torch._C._current_graph_task_id() != -1, self.stream())
        if user in self._multiplied:
            return
        self._multiplied.add(user)
        # A part of a program does not know what ran before
        if self.device_type == "meta":
            self.add(Mark(FIRST_MATMUL, "backward" if user[0] else "forward"))
        elif self._workspace_bytes:
            with replaced((self.storages, "phase", "library")):
                self.storages.begin(Storage(self._workspace_bytes, True))

    def stream(self) -> int:
        """Number of the current stream."""
        return (
            MODULE.current.number
            if self.device_type not in ("cpu", "meta")
            else COMPUTE_STREAM
        )

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record the program."""
        resize = torch.UntypedStorage.resize_
        propagate = ShardingPropagator._propagate_tensor_meta_non_cached

        def watched_resize(storage: torch.UntypedStorage, size: int) -> Any:
            resized = resize(storage, size)
            self.storages.resize(storage._cdata, size)
            return resized

        def record_stream(tensor: Tensor, stream: Any) -> None:
            storage = self.storages.find(tensor)
            if storage is not None and storage.on_device:
                self.add(simulated.RecordStream(storage.block, stream.number))

        def is_pinned(tensor: Tensor, device: Any = None) -> bool:
            storage = self.storages.find(tensor)
            return storage is not None and storage.pinned

        def quiet_propagate(*args: Any, **kwargs: Any) -> Any:
            # DTensor infers an operator's output by running it on tensors of the global shape.
            with replaced((self, "_silent", True)):
                return propagate(*args, **kwargs)

        replacements = (
            (torch.UntypedStorage, "resize_", watched_resize),
            (Tensor, "record_stream", record_stream),
            (Tensor, "is_pinned", is_pinned),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", quiet_propagate),
            (FakeTensor, "tolist", lambda tensor: self._numbers(tensor)),
            (MODULE, "listener", self),
        )
        with replaced(*replacements), self:
            yield
