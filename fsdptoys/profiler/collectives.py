"""Every collective of one step, in the order in which this rank issues them, whoever does.

A dispatch mode lies around the step. PyTorch shows it each operator before it runs, with its tensors and its process
group: those that Python calls, those of DDP's reducer in C++, and those that autograd's threads issue in a backward,
which inherit the mode. Nothing is replaced, so the step computes what it would have; it takes longer, since every other
operator passes by as well.

What is written down is the asking: when a collective is issued, not when it is done. With overlap that may be a whole
layer later; a profiler's trace shows it.

Bytes are those of the algorithms in the textbooks: on a ring of N ranks an all-gather or a reduce-scatter of S bytes
has each rank send S·(N−1)/N, an all-reduce twice that. A broadcast or a reduce passes S from rank to rank, N−1 times,
which is S·(N−1)/N on average. Libraries may choose other ways; what arrives where is the same.

Left out: what libraries exchange to find each other; objects of Python are seen as the tensors that carry them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .collective_callers import Origins
from .dispatch import COLLECTIVES, arguments_of, dtype_name, given, tensors_in

FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast": "broadcast",
    "all_to_all_single": "all_to_all",
}
"""Operators of ``_c10d_functional``, whose variants end in ``_``, ``_out`` or ``_coalesced``."""
MESSAGES = {"send": "send", "recv_": "receive", "recv_any_source_": "receive", "barrier": "barrier"}
PHASES = ("forward", "backward")
"""Of the trainer's; in its ``optimizer``, who called decides."""
OTHER = "other"


@dataclass
class Call:
    """One collective, as one rank sees it."""

    number: int
    phase: str
    microbatch: int | None
    """Within the step, from 1; None outside of forward and backward."""
    collective: str
    dtype: str
    size_bytes: int
    """Of the whole tensor: what an all-gather makes, what a reduce-scatter takes."""
    gives_bytes: int
    """What this rank puts in."""
    gets_bytes: int
    """What it has afterwards that it did not have."""
    sends_bytes: float
    """What a rank sends on average, on a ring."""
    ranks: int
    group: str
    """The description of the process group."""
    site: str
    """The innermost function that called it, outside of torch.distributed's own."""
    parameters: list[str] = field(default_factory=list)
    """Whose values or gradients it moves, where that is known."""


class CollectiveTrace(TorchDispatchMode):
    """Watches one step.

    Args:
        step: which.
        model: whose parameters collectives are told by.
        within: phase → functions in whose calls it is that one, for what the trainer calls ``optimizer``.
        done: called with all collectives after the step.
    """

    def __init__(
        self, step: int, model: nn.Module, within: dict[CodeType, str], done: Callable[[list[Call]], None]
    ) -> None:
        super().__init__()
        self.step, self.calls = step, []
        self._model, self._done = model, done
        self._origins = Origins(model, within)
        self._phase, self._microbatch = OTHER, 0
        self._reduced: list[tuple[Call, list[Tensor]]] = []
        """All-reduces of the backward with their tensors, in which gradients may lie once it has ended."""

    calls: list[Call]

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Surround each step."""
        if step != self.step:
            yield
            return
        with self:
            yield
        self._done(self.calls)

    def enter(self, step: int, phase: str) -> None:
        """Be told of a phase of the trainer's."""
        if step == self.step:
            self._phase = phase
            self._microbatch += phase == "forward"
            if phase == "optimizer":
                self._name_gradients()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Write down a collective, and run whatever it is."""
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # a DTensor's operator calls those that count
        name = _collective(func)
        if name is not None:
            self._write_down(name, func, args, kwargs)
        return func(*args, **kwargs)

    def _write_down(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = {argument.name: value for argument, value in given(arguments_of(func), args, kwargs)}
        group = _group(values)
        ranks, rank = group.size(), group.rank()
        sets = [found for value in args if (found := list(tensors_in(value)))]
        sizes = [sum(tensor.numel() * tensor.element_size() for tensor in tensors) for tensors in sets]
        size = max(sizes, default=0)
        if func.namespace == "_c10d_functional" and name == "all_gather":
            size *= ranks
        root = values.get("root_rank", values.get("src", 0))
        gives, gets = _exchanged(name, size, ranks, rank == root)
        origin = self._origins.find(self._phase)
        in_microbatch = origin.phase in PHASES
        call = Call(
            number=len(self.calls) + 1,
            phase=origin.phase,
            microbatch=self._microbatch if in_microbatch else None,
            collective=name,
            dtype=dtype_name(sets[0][0]) if sets and name != "barrier" else "",
            size_bytes=size if name != "barrier" else 0,
            gives_bytes=gives,
            gets_bytes=gets,
            sends_bytes=ring_bytes(name, size, ranks),
            ranks=ranks,
            group=group.group_desc,
            site=origin.site,
            parameters=origin.parameters or self._origins.stored_in(sets),
        )
        self.calls.append(call)
        if name == "all_reduce" and call.phase == "backward" and not call.parameters:
            self._reduced.append((call, sets[0]))

    def _name_gradients(self) -> None:
        """Find the gradients that lie in what was all-reduced."""
        named = [(name, param.grad) for name, param in self._origins.named if param.grad is not None]
        local = [(name, grad.to_local() if isinstance(grad, DTensor) else grad) for name, grad in named]
        for call, tensors in self._reduced:
            storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
            call.parameters = [name for name, grad in local if grad.untyped_storage().data_ptr() in storages]
        self._reduced.clear()


def ring_bytes(collective: str, size: int, ranks: int) -> float:
    """Bytes that a rank sends on average, on a ring.

    Args:
        collective: as ``all_gather``.
        size: bytes of the whole tensor.
        ranks: that take part.
    """
    once = size * (ranks - 1) / ranks
    if collective == "all_reduce":
        return 2 * once
    if collective in ("gather", "scatter"):
        return once / ranks
    return {"send": float(size), "receive": 0.0, "barrier": 0.0}.get(collective, once)


def _exchanged(name: str, size: int, ranks: int, is_root: bool) -> tuple[int, int]:
    """Bytes that this rank puts in, and gets."""
    part = size // ranks
    return {
        "all_gather": (part, size),
        "reduce_scatter": (size, part),
        "broadcast": (size, 0) if is_root else (0, size),
        "reduce": (size, size if is_root else 0),
        "gather": (part, size if is_root else 0),
        "scatter": (size if is_root else 0, part),
        "send": (size, 0),
        "receive": (0, size),
        "barrier": (0, 0),
    }.get(name, (size, size))


def _collective(func: Any) -> str | None:
    """What an operator does over ranks; None for all others."""
    if func.namespace == "c10d":
        name = func._schema.name.partition("::")[2]
        return COLLECTIVES.get(name) or MESSAGES.get(name)
    if func.namespace == "_c10d_functional":
        name = func._schema.name.partition("::")[2].removesuffix("_out").removesuffix("_").removesuffix("_coalesced")
        return FUNCTIONAL.get(name)
    return None


def _group(values: dict[str, Any]) -> dist.ProcessGroup:
    """The process group of a call."""
    if "process_group" in values:
        return dist.ProcessGroup.unbox(values["process_group"])
    named = values["group_name"]
    return named if isinstance(named, dist.ProcessGroup) else dist.distributed_c10d._resolve_process_group(named)


def traced_step(first: int, last: int) -> int:
    """Which step of a run is watched: the third that it takes, or its last.

    In the first one, and at the beginning of the second, DDP's reducers and FSDP's units learn their order.

    Args:
        first: number of the first step that the run takes.
        last: of its last.
    """
    return min(first + 2, last)


def over_ranks(calls: Sequence[Call]) -> list[Call]:
    """Those between ranks: one rank alone sends nothing, but its program calls the same."""
    return [call for call in calls if call.ranks > 1]
