"""Births and deaths of storages, and operators, while a part of a model runs on the meta device.

A trace is cut into stages at the borders of a block's attention and feed-forward, which may be units.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptoys.device.profile import AttentionKind
from fsdptoys.plan.trace.op_costs import EMPTY, NO_KERNEL, TRAFFIC, Operator, cost_of, scratch_bytes
from fsdptoys.profiler.dispatch import arguments_of, given, tensors_in

INPUT = 0  # Number of the storage of a part's input
PARTS = ("attn", "mlp")  # Parts of a block that may be units


@dataclass(frozen=True)
class Stage:
    """A section of a forward or backward."""

    part: str  # ``attn``, ``mlp``, or empty for the rest of the block
    backward: bool  # Whether gradients are computed; False for recomputation
    peak_bytes: int  # Highest live bytes, relative to the start
    net_bytes: int  # Live bytes at the end minus those at the start
    operators: tuple[Operator, ...]
    storages: tuple[tuple[int, int], ...]
    """Births and deaths in order: storage number, and bytes or 0 for a death; ``INPUT`` is the part's input."""


class MetaTrace(TorchDispatchMode):
    """Records live storages and executed operators on the meta device; ``cut`` divides them into stages."""

    def __init__(self, attention: AttentionKind) -> None:
        super().__init__()
        self.attention, self.part, self.backward = attention, "", False
        self.live = self._peak = self._start = 0
        self.sizes: dict[int, int] = {}
        self.numbers: dict[int, int] = {}
        self.ignored: set[int] = set()  # Storages from before: parameters and inputs
        self.stages: list[Stage] = []
        self.operators: list[Operator] = []
        self._storages: list[tuple[int, int]] = []
        self._count = INPUT  # Number of the next storage; the input has the first

    def ignore(self, *tensors: Tensor) -> None:
        """Leave out storages from before."""
        self.ignored.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def cut(self, part: str = "", backward: bool = False) -> None:
        """End a stage and start one."""
        if self.operators or self._storages:
            peak_bytes, net_bytes = self._peak - self._start, self.live - self._start
            events = tuple(self.operators), tuple(self._storages)
            self.stages.append(Stage(self.part, self.backward, peak_bytes, net_bytes, *events))
        self.part, self.backward = part, backward
        self.begin()

    def begin(self) -> None:
        """Discard the events since the last cut."""
        self._count = max(self._count, INPUT + 1)
        self._peak = self._start = self.live
        self.operators, self._storages = [], []

    def scratch(self, sizes: list[int]) -> None:
        """Count a kernel's temporary memory."""
        self._peak = max(self._peak, self.live + sum(-(-size // 512) * 512 for size in sizes))
        numbers = range(self._count, self._count + len(sizes))
        self._count += len(sizes)
        self._storages += [*zip(numbers, sizes, strict=True), *((number, 0) for number in numbers)]

    def see(self, tensor: Tensor) -> None:
        """Record a new storage until it dies."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.sizes or key in self.ignored:
            return
        size = -(-storage.nbytes() // 512) * 512
        if size == 0:
            return
        number = self.numbers[key] = self._count
        self._count += 1
        self.sizes[key] = size
        self.live += size
        self._peak = max(self._peak, self.live)
        self._storages.append((number, size))

        def die() -> None:
            self.live -= self.sizes.pop(key)
            self._storages.append((self.numbers.pop(key), 0))

        weakref.finalize(storage, die).atexit = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        inputs = [
            (argument, tensor)
            for argument, value in given(arguments_of(func), args, kwargs)
            for tensor in tensors_in(value)
        ]
        results = func(*args, **kwargs)
        made = list(tensors_in(results))
        for tensor in made:
            self.see(tensor)
        storages = {tensor.untyped_storage()._cdata for _, tensor in inputs}
        fresh = [tensor for tensor in made if tensor.untyped_storage()._cdata not in storages]
        mutates = name in TRAFFIC or any(argument.writes for argument, _ in inputs)
        launches_nothing = name in NO_KERNEL or name.startswith(EMPTY)
        if func.is_view or launches_nothing or not (fresh or mutates):
            return results
        if scratch := scratch_bytes(name, args, self.attention):
            self.scratch(scratch)
        self.operators.append(cost_of(func, args, kwargs, results, inputs, fresh))
        return results


class Mark(torch.autograd.Function):
    """Identity that cuts stages in forward and backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, trace: MetaTrace, part: str, enters: bool) -> Tensor:
        """Return the tensor."""
        ctx.trace, ctx.part, ctx.enters = trace, part, enters
        trace.cut(part if enters else "")
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient."""
        ctx.trace.cut("" if ctx.enters else ctx.part, backward=True)
        return grads[0], None, None, None


class Source(torch.autograd.Function):
    """An input without history; its gradient is discarded."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of that shape."""
        return anchor.new_empty(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return a placeholder."""
        return grads[0].new_empty((), dtype=torch.float32), None, None


class Sink(torch.autograd.Function):
    """Consumer of a part's output, which provides its gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        """Return a scalar."""
        ctx.shape, ctx.dtype = output.shape, output.dtype
        return output.new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return a gradient of the output's shape."""
        return grads[0].new_empty(ctx.shape, dtype=ctx.dtype)
