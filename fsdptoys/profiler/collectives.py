"""Record every collective of one step, in the order in which this rank issues them.

A dispatch mode around the step sees each operator before it runs, with its tensors and process
group: those called from Python, those of DDP's reducer in C++, and those of autograd's threads in a
backward, which inherit the mode. Nothing is replaced, so results are unchanged; the step is slower,
since the mode sees all other operators, too.

Recorded is when a collective is issued, not when it completes. With overlap that may be a layer
later; a profiler's trace shows it.

Bytes are those of ring algorithms: with N ranks each sends S·(N−1)/N in an all-gather or
reduce-scatter of S bytes, and twice that in an all-reduce. A broadcast or reduce passes S from rank
to rank, N−1 times: S·(N−1)/N on average. Libraries may choose other algorithms with the same
result. An all-to-all with uneven splits is counted by its splits.

Not covered: the libraries' own rendezvous. Python objects appear as the tensors that carry them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .collective_origins import PHASES, Origins
from .dispatch import COLLECTIVES, arguments_of, bind_arguments, dtype_name, tensors_in

FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast": "broadcast",
    "all_to_all_single": "all_to_all",
}
"""Operators of ``_c10d_functional``, whose variants end in ``_``, ``_out`` or ``_coalesced``."""
MESSAGES = {
    "send": "send",
    "recv_": "receive",
    "recv_any_source_": "receive",
    "barrier": "barrier",
}


@dataclass
class Call:
    """One collective of one rank."""

    number: int
    phase: str
    microbatch: int | None  # Within the step, from 1; None outside forward and backward
    collective: str
    dtype: str
    # Of the full tensor: an all-gather's output, a reduce-scatter's input
    size_bytes: int
    gives_bytes: int  # Input of this rank
    gets_bytes: int  # New data on this rank afterwards
    sends_bytes: float  # Sent by a rank on average, on a ring; by this rank in an uneven all-to-all
    ranks: int
    group: str  # The description of the process group
    site: str  # Innermost calling function outside torch.distributed
    # Parameters whose values or gradients it moves, if known
    parameters: list[str] = field(default_factory=list)


class CollectiveTrace(TorchDispatchMode):
    """Records the collectives of one step, and passes them to ``on_end`` after it.

    Args:
        model: names the parameters.
        within: function → phase of the calls within it, for the trainer's phase ``optimizer``.
    """

    def __init__(
        self,
        step: int,
        model: nn.Module,
        within: dict[CodeType, str],
        on_end: Callable[[list[Call]], None],
    ) -> None:
        super().__init__()
        self.step = step
        self._on_end = on_end
        self.calls: list[Call] = []
        self._origins = Origins(model, within)
        self._phase = "other"
        self._microbatch = 0
        # All-reduces of the backward with their tensors, which may hold gradients after it.
        self._reduced: list[tuple[Call, list[Tensor]]] = []

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Wrap each step."""
        if step != self.step:
            yield
            return
        with self:
            yield
        self._on_end(self.calls)

    def enter(self, step: int, phase: str) -> None:
        """Set the trainer's phase."""
        if step == self.step:
            self._phase = phase
            self._microbatch += phase == "forward"
            if phase == "optimizer":
                self._name_gradients()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Record the operator if it is a collective, and run it."""
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # the operators of the local tensors follow
        name = _collective(func)
        if name is not None:
            self._record(name, func, args, kwargs)
        return func(*args, **kwargs)

    def _record(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        values = {
            argument.name: value
            for argument, value in bind_arguments(arguments_of(func), args, kwargs)
        }
        group = _group(values)
        ranks = group.size()
        rank = group.rank()
        sets = [tensors for value in args if (tensors := list(tensors_in(value)))]
        sizes = [
            sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            for tensors in sets
        ]
        size = max(sizes, default=0)
        if func.namespace == "_c10d_functional" and name == "all_gather":
            size *= ranks
        root = values.get("root_rank", values.get("src", 0))
        gives, gets = _exchanged(name, size, ranks, rank == root)
        sends = ring_bytes(name, size, ranks)
        splits = values.get("input_split_sizes")
        if splits and func.namespace == "c10d":
            gets, gives = sizes  # output and input
            sends = gives * (1 - splits[rank] / max(1, sum(splits)))
        site, phase, parameters = self._origins.find(self._phase)
        call = Call(
            number=len(self.calls) + 1,
            phase=phase,
            microbatch=self._microbatch if phase in PHASES else None,
            collective=name,
            dtype=dtype_name(sets[0][0]) if sets and name != "barrier" else "",
            size_bytes=size if name != "barrier" else 0,
            gives_bytes=gives,
            gets_bytes=gets,
            sends_bytes=sends,
            ranks=ranks,
            group=group.group_desc,
            site=site,
            parameters=parameters or self._origins.stored_in(sets),
        )
        self.calls.append(call)
        if name == "all_reduce" and call.phase == "backward" and not call.parameters:
            self._reduced.append((call, sets[0]))

    def _name_gradients(self) -> None:
        """Find the gradients stored in all-reduced tensors."""
        grads = [
            (name, param.grad)
            for name, param in self._origins.named_params
            if param.grad is not None
        ]
        local = [
            (name, grad.to_local() if isinstance(grad, DTensor) else grad)
            for name, grad in grads
        ]
        for call, tensors in self._reduced:
            storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
            call.parameters = [
                name
                for name, grad in local
                if grad.untyped_storage().data_ptr() in storages
            ]
        self._reduced.clear()


def ring_bytes(collective: str, size: int, ranks: int) -> float:
    """Bytes that a rank sends on average in a collective of ``size`` bytes, the full tensor's, on a
    ring."""
    once = size * (ranks - 1) / ranks
    by_rank = {"all_reduce": 2 * once, "gather": once / ranks, "scatter": once / ranks}
    return (by_rank | {"send": float(size), "receive": 0.0, "barrier": 0.0}).get(
        collective, once
    )


def _exchanged(name: str, size: int, ranks: int, is_root: bool) -> tuple[int, int]:
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
    """Name of an operator's collective; None for other operators."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func._schema.name.partition("::")[2]
    if func.namespace == "c10d":
        return COLLECTIVES.get(name) or MESSAGES.get(name)
    return FUNCTIONAL.get(
        name.removesuffix("_out").removesuffix("_").removesuffix("_coalesced")
    )


def _group(values: dict[str, Any]) -> dist.ProcessGroup:
    if "process_group" in values:
        return dist.ProcessGroup.unbox(values["process_group"])
    group = values["group_name"]
    return (
        group
        if isinstance(group, dist.ProcessGroup)
        else dist.distributed_c10d._resolve_process_group(group)
    )


def traced_step(first: int, last: int) -> int:
    """The recorded step: the third of the run, or its last.

    DDP's reducers and FSDP's units learn their order in the first step and at the start of the
    second.
    """
    return min(first + 2, last)
