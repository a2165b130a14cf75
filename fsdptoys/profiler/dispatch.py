"""What a dispatch mode can tell of a call that it sees: arguments by their names, tensors among them, collectives.

PyTorch shows every operator to a ``TorchDispatchMode`` with its schema, whoever called it: Python, autograd, or the C++
of DDP's reducer. All here is read off schema and arguments.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "_foreach_copy_", "_foreach_zero_")
"""Operators that do not read what they write to."""

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


def dtype_name(tensor: Tensor) -> str:
    """As ``bfloat16``."""
    return str(tensor.dtype).removeprefix("torch.")
