"""What can be told of an operator from its schema and its arguments: what it touches, and what kind of work it is."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

COPIES = ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_")
"""Operators that may cross from host to device."""
OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "_foreach_copy_", "_foreach_zero_")
"""Operators that do not read what they write to."""
NO_KERNEL = ("aten::set_", "aten::resize_", "aten::lift_fresh", "aten::lift", "aten::is_pinned", "prim::device")

COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "broadcast_": "broadcast",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
}
"""Operators of ``c10d`` → what they do. A barrier moves nothing."""

LOOK_UPS = {
    "aten::embedding": "weight",
    "aten::index_select": "self",
    "aten::gather": "self",
    "aten::index": "self",
    "aten::scatter_add_": "self",
    "aten::scatter_": "self",
    "aten::index_add_": "self",
    "aten::index_put_": "self",
}
"""Operators that touch only some rows of an argument: as much of it as of the others."""


def _copied_into_place(args: tuple[Any, ...]) -> int:
    return 2 * sum(map(touched_bytes, tensors_in(args[0])))


def _three_passes(args: tuple[Any, ...]) -> int:
    return 3 * touched_bytes(args[0])


TRAFFIC: dict[str, Callable[[tuple[Any, ...]], int]] = {
    # Its schema does not say that it writes.
    "fsdp::all_gather_copy_in": _copied_into_place,
    # Reads the logits twice and writes them once (``memory.softmax_triton``).
    "planned::softmax_gradient_": _three_passes,
}
"""Bytes that operators read and write of which the schema does not tell."""


class Argument(NamedTuple):
    """What an operator does with one of its arguments."""

    name: str
    reads: bool
    writes: bool


def arguments_of(func: Any) -> list[Argument]:
    """The arguments of an operator, by its schema."""
    name = func._schema.name.partition("::")[2]
    arguments = []
    for argument in func._schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        overwrites = writes and (argument.kwarg_only or name in OVERWRITES)
        arguments.append(Argument(argument.name, not overwrites, writes))
    return arguments


def given(arguments: list[Argument], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Argument, Any]]:
    """Those arguments that a call gives, with their values."""
    yield from zip(arguments, args, strict=False)
    for argument in arguments[len(args) :]:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of an argument or a result."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def touched_bytes(tensor: Tensor) -> int:
    """What a kernel touches of a tensor: its elements, each of its memory's once where it is broadcast."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def traffic(name: str, args: tuple[Any, ...], inputs: list[tuple[Argument, Tensor]], fresh: list[Tensor]) -> int:
    """Bytes that an operator reads and writes.

    Args:
        name: of the operator.
        args: of the call.
        inputs: tensors that it is given.
        fresh: tensors that it makes.
    """
    if name in TRAFFIC:
        return TRAFFIC[name](args)
    written = sum(map(touched_bytes, fresh))
    looked_up = LOOK_UPS.get(name)
    if looked_up is not None and not fresh:
        written = max((touched_bytes(tensor) for argument, tensor in inputs if argument.name != looked_up), default=0)
    total, seen = written if fresh else 0, set()
    for argument, tensor in inputs:
        size = touched_bytes(tensor)
        if argument.name == looked_up:
            size = min(size, written)
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape)
        if key not in seen:
            seen.add(key)
            total += size * (argument.reads + argument.writes)
    return total


def dtype_name(tensor: Tensor) -> str:
    """As ``bfloat16``."""
    return str(tensor.dtype).removeprefix("torch.")


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_async_by_default(func: Any) -> bool:
    """What a collective's ``async_op`` is where it is not given."""
    return any(argument.name == "async_op" and argument.default_value for argument in func._schema.arguments)
