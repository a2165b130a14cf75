"""Collectives and messages of a recorded program, on the streams of their groups."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.metrics.prediction import Category
from fsdptoys.parallel.mesh import EXCHANGING_AXES
from fsdptoys.plan.simulator import events as simulated
from fsdptoys.plan.simulator.events import COMPUTE_STREAM
from fsdptoys.profiler.dispatch import (
    COLLECTIVES,
    arguments_of,
    bind_arguments,
    tensors_in,
)

from .fake_device import MODULE
from .groups import place_of
from .op_costs import touched_bytes
from .storages import Storages

# Stream of exchanges on the meta device and on CPUs, which have no streams
EXCHANGE = -3
PURPOSES = {
    "all_gather": Category.gathered_parameters,
    "reduce_scatter": Category.reduction_buffers,
    "all_reduce": Category.reduction_buffers,
}
"""Collective → purpose of its buffers."""


class Exchanges:
    """Adds a program's exchanges to its trace, and the waits of the compute stream for them.

    ``stream`` returns the number of the current stream.
    """

    def __init__(
        self,
        device_type: str,
        storages: Storages,
        add: Callable[[simulated.Event], None],
        stream: Callable[[], int],
    ) -> None:
        self._device_type = device_type
        self._storages = storages
        self._add = add
        self._stream = stream
        self._groups: dict[str, Any] = {}  # Group → its own stream
        self._pending: dict[int, int] = {}
        """Stream of a group → event at the end of its last work without a wait."""
        self.device_events = 0  # Events on the streams of a meta device

    @property
    def streams(self) -> list[int]:
        """Numbers of the streams of groups."""
        return [stream.number for stream in self._groups.values()]

    def wait(self) -> None:
        """Let the compute stream wait for all work that nothing has waited for."""
        for event in self._pending.values():
            self._add(simulated.WaitEvent(event, COMPUTE_STREAM))
        self._pending.clear()

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a collective as if it were complete; record its size, group and stream."""
        values = {
            argument.name: value
            for argument, value in bind_arguments(arguments_of(func), args, kwargs)
        }
        name = COLLECTIVES.get(func._schema.name.partition("::")[2])
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(tensors_in(args[0])))
        work = torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]
        result = (args[0], work) if len(func._schema.returns) == 2 else work
        tensors = [tensor for value in args for tensor in tensors_in(value)]
        if name is None or not any(
            tensor.device.type == self._device_type for tensor in tensors
        ):
            return result
        largest = max(sum(map(touched_bytes, tensors_in(value))) for value in args)
        by_default = any(
            argument.name == "async_op" and argument.default_value
            for argument in func._schema.arguments
        )
        group = dist.ProcessGroup.unbox(values["process_group"])
        self.communicate(
            name,
            tensors,
            largest,
            group,
            asynchronous=values.get("async_op", by_default),
        )
        return result

    def communicate(
        self,
        name: str,
        tensors: Iterable[Tensor],
        size: int,
        group: Any,
        *,
        asynchronous: bool,
    ) -> Callable[[], None]:
        """Record a collective of ``size`` bytes, and return a function with which the current
        stream waits for it."""
        shape, axis = place_of(group, name)
        purpose = (
            Category.exchange_buffers if axis in EXCHANGING_AXES else PURPOSES.get(name)
        )
        for tensor in tensors:
            self._storages.see(tensor)
            if purpose is not None:
                self._storages.categorize(tensor, purpose)
        if not asynchronous or self._device_type == "cpu":
            self._add(simulated.Collective(name, self._stream(), size, *shape, axis))
            return lambda: None
        return self._issue(
            lambda stream: simulated.Collective(name, stream, size, *shape, axis), group
        )

    def exchange(
        self, parts: Sequence[tuple[bool, Tensor, int]], group: Any
    ) -> Callable[[], None]:
        """Record messages that are issued together, and return a function with which the current
        stream waits for them.

        Each is sent or received: whether it is sent, its tensor, and the other rank in the group.
        """
        shape, axis = place_of(group, "send")
        for _, tensor, _ in parts:
            self._storages.see(tensor)
            self._storages.categorize(tensor, Category.exchange_buffers)
        messages = tuple(
            simulated.Message(peer, tensor.nbytes, sends)
            for sends, tensor, peer in parts
        )
        return self._issue(
            lambda stream: simulated.Messages(
                stream, messages, group.rank(), *shape, axis
            ),
            group,
        )

    def _issue(
        self, event_on: Callable[[int], simulated.Event], group: Any
    ) -> Callable[[], None]:
        """Add an event on the stream of a group; the compute stream waits for it with the work."""
        if self._device_type in ("cpu", "meta"):
            self.device_events += 2
            ready = self.device_events - 1
            finished = self.device_events
            self._add(simulated.RecordEvent(ready, COMPUTE_STREAM))
            self._add(simulated.WaitEvent(ready, EXCHANGE))
            self._add(event_on(EXCHANGE))
            self._add(simulated.RecordEvent(finished, EXCHANGE))
            return lambda: self._add(simulated.WaitEvent(finished, COMPUTE_STREAM))
        own = self._groups.get(group.group_name) or self._groups.setdefault(
            group.group_name, MODULE.Stream()
        )
        own.wait_stream(MODULE.current)
        self._add(event_on(own.number))
        event = own.record_event()
        assert event.number is not None
        self._pending[own.number] = event.number
        return lambda: MODULE.current.wait_event(event)
