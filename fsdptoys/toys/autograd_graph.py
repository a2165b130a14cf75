"""What the toys ask of autograd: which leaves a backward reaches, when it ends, and tensors inside of any output."""

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def queue_callback(callback: Callable[[], None]) -> None:
    """Have autograd call something at the end of the backward that runs; PyTorch has no public way to ask for it."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def reached_leaves(outputs: Iterable[Tensor]) -> set[Tensor]:
    """Leaves of autograd's graph that a backward from any of some tensors would come to."""
    outputs = list(outputs)
    leaves = {output for output in outputs if output.is_leaf and output.requires_grad}
    seen: set[Any] = {output.grad_fn for output in outputs if output.grad_fn is not None}
    ahead = list(seen)
    while ahead:
        node = ahead.pop()
        if type(node).__name__ == "AccumulateGrad":
            leaves.add(node.variable)
        following = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= following
        ahead += following
    return leaves


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors inside of lists, tuples, dicts and dataclasses, in their order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    yield from found


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same lists, tuples, dicts and dataclasses with every tensor replaced; anything else stays what it is."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(item, function) for item in value)
    if isinstance(value, dict):
        made = copy.copy(value)
        made.update({key: map_tensors(item, function) for key, item in value.items()})
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            # Also where the class is frozen.
            object.__setattr__(changed, field.name, map_tensors(getattr(value, field.name), function))
        return changed
    return value


class Sink(torch.autograd.Function):
    """Passes all tensors of an output through one node, and calls something when the backward enters it.

    An output that the loss does not use then gets an undefined gradient, rather than no visit: the hooks of parameters
    that only it depends on run all the same.
    """

    @staticmethod
    def forward(
        ctx: Any, on_backward: "weakref.WeakMethod[Callable[[], None]]", *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Copy the outputs, since a view of a function's output could not be changed in place."""
        ctx.set_materialize_grads(False)
        ctx.on_backward = on_backward
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Hand on the gradients as they are."""
        bound = ctx.on_backward()
        if bound is not None:
            bound()
        return None, *grads


def through_sink(output: Any, on_backward: Callable[[], None]) -> Any:
    """An output with those of its tensors that have a gradient passed through one :class:`Sink`.

    Args:
        output: of a forward.
        on_backward: a method, which is not kept alive.
    """
    passed = iter(
        Sink.apply(weakref.WeakMethod(on_backward), *(t for t in tensors_in(output) if t.grad_fn is not None))
    )
    return map_tensors(output, lambda tensor: tensor if tensor.grad_fn is None else next(passed))
