"""Collectives in a trace: ``c10d`` calls that return at once, recorded with their sizes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdptoys.metrics.prediction import Category
from fsdptoys.plan.simulator.events import COMPUTE_STREAM, Collective, Event, WaitEvent
from fsdptoys.profiler.dispatch import COLLECTIVES, arguments_of, given, tensors_in

from .fake_device import MODULE
from .op_costs import touched_bytes
from .storages import Storages

PURPOSES = {
    "all_gather": Category.gathered_parameters,
    "reduce_scatter": Category.reduction_buffers,
    "all_reduce": Category.reduction_buffers,
}


class Collectives:
    """Answers calls, and records size, group and stream of each collective."""

    def __init__(
        self, device_type: str, storages: Storages, stream: Callable[[], int], add: Callable[[Event], None]
    ) -> None:
        self._device_type, self._storages, self._stream, self._add = device_type, storages, stream, add
        self._own: dict[str, Any] = {}  # Group → its stream
        self._pending: dict[int, int] = {}  # Stream of a group → event at the end of its last work without a wait

    @property
    def streams(self) -> list[int]:
        """Numbers of the groups' own streams."""
        return [stream.number for stream in self._own.values()]

    def join(self) -> None:
        """Let the compute stream wait for all pending work."""
        for event in self._pending.values():
            self._add(WaitEvent(event, COMPUTE_STREAM))
        self._pending.clear()

    def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call as if it were complete."""
        named = {argument.name: value for argument, value in given(arguments_of(func), args, kwargs)}
        name = COLLECTIVES.get(func._schema.name.partition("::")[2])
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(tensors_in(args[0])))
        work = torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]
        result = (args[0], work) if len(func._schema.returns) == 2 else work
        tensors = [tensor for value in args for tensor in tensors_in(value)]
        if name is None or not any(tensor.device.type == self._device_type for tensor in tensors):
            return result
        for tensor in tensors:
            self._storages.see(tensor)
            if name in PURPOSES:
                self._storages.categorize(tensor, PURPOSES[name])
        largest = max(sum(map(touched_bytes, tensors_in(value))) for value in args)
        group = dist.ProcessGroup.unbox(named["process_group"])
        ranks = dist.get_process_group_ranks(group)
        size, stride = len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1
        axis = axis_of(group.group_desc, name, stride, size == dist.get_world_size())
        by_default = any(each.name == "async_op" and each.default_value for each in func._schema.arguments)
        if not named.get("async_op", by_default) or self._device_type == "cpu":
            self._add(Collective(name, self._stream(), largest, size, stride, axis))
            return result
        # The group has its own stream; the compute stream waits for it with the work.
        if group.group_name not in self._own:
            self._own[group.group_name] = MODULE.Stream()
        own = self._own[group.group_name]
        own.wait_stream(MODULE.current)
        self._add(Collective(name, own.number, largest, size, stride, axis))
        done = own.record_event().number
        assert done is not None
        self._pending[own.number] = done
        return result


def axis_of(description: str, name: str, stride: int, everyone: bool) -> str:
    """Mesh axis of a group, by its mesh's description; the group of a one-axis mesh has none."""
    if description in ("mesh_shard", "mesh_replicate"):
        return description.removeprefix("mesh_")
    if everyone and name not in ("all_gather", "reduce_scatter"):
        return "world"
    return "shard" if stride == 1 else "replicate"
