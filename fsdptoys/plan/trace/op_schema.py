"""Traffic and kind of an operator, from its schema and arguments."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdptoys.profiler.dispatch import Argument, tensors_in

COPIES = ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_")  # Operators that may copy between host and device
NO_KERNEL = ("aten::set_", "aten::resize_", "aten::lift_fresh", "aten::lift", "aten::is_pinned", "prim::device")

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
"""Operators that touch only some rows of this argument: as many bytes as of the others."""


TRAFFIC: dict[str, Callable[[tuple[Any, ...]], int]] = {
    # Its schema does not declare the write.
    "fsdp::all_gather_copy_in": lambda args: 2 * sum(map(touched_bytes, tensors_in(args[0]))),
    # Reads the logits twice and writes them once (``loss.softmax_triton``).
    "planned::softmax_gradient_": lambda args: 3 * touched_bytes(args[0]),
}
"""Bytes that operators read and write, where the schema does not show it."""


def touched_bytes(tensor: Tensor) -> int:
    """Bytes that a kernel touches of a tensor; broadcast memory counts once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def traffic(name: str, args: tuple[Any, ...], inputs: list[tuple[Argument, Tensor]], fresh: list[Tensor]) -> int:
    """Bytes that an operator reads and writes; ``fresh`` are new tensors among its results."""
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


def local(tensor: Tensor) -> Tensor:
    """A tensor's shard on this rank."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_async_by_default(func: Any) -> bool:
    """Default of a collective's ``async_op``."""
    return any(argument.name == "async_op" and argument.default_value for argument in func._schema.arguments)
