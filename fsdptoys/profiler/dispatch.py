"""Helpers for dispatch modes: an operator's arguments by name, their tensors, and collectives.

A ``TorchDispatchMode`` sees every operator with its schema, called from Python, autograd or the C++
of DDP's reducer.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

OVERWRITES = (
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "random_",
    "_foreach_copy_",
    "_foreach_zero_",
)
"""Operators that do not read their output."""

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
"""Operator of ``c10d`` → collective; a barrier, which moves nothing, is none."""


class Argument(NamedTuple):
    """Access of an operator to one argument."""

    name: str
    reads: bool
    writes: bool


def arguments_of(func: Any) -> list[Argument]:
    """The arguments in an operator's schema."""
    name = func._schema.name.partition("::")[2]
    arguments = []
    for argument in func._schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        overwrites = writes and (argument.kwarg_only or name in OVERWRITES)
        arguments.append(Argument(argument.name, not overwrites, writes))
    return arguments


def bind_arguments(
    arguments: list[Argument], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Argument, Any]]:
    """The arguments of a call, with their values."""
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


def dtype_name(tensor: Tensor) -> str:
    """Such as ``bfloat16``."""
    return str(tensor.dtype).removeprefix("torch.")
