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

The call stack shows the caller, and often the parameters: the gathered or reduced unit, bucket or
share is a variable of one of the functions. Otherwise the addresses of the tensors may match
parameters; else they stay unnamed. PyTorch's FSDP has no public way from a collective to its unit;
only ``_native_names`` reads private attributes.

Not covered: the libraries' own rendezvous. Python objects appear as the tensors that carry them.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .dispatch import COLLECTIVES, arguments_of, dtype_name, given, tensors_in

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
WRAPPERS = ("module", "_fsdp_wrapped_module", "_orig_mod")
"""Parts of a parameter's name that come from wrappers around the model."""
PASSED_BY = (
    "torch.distributed.distributed_c10d",
    "torch.distributed.c10d_logger",
    "torch.distributed._functional_collectives",
    "torch._compile",
    "torch._dynamo",
    "torch.autograd",
    "torch.utils",
    "torch._ops",
    "torch._tensor",
    "torch.nn.modules.module",
    "contextlib",
    "fsdptoys.profiler.collectives",
)
"""Modules and packages between the caller and the collective."""
CARRIERS = ("share", "bucket", "handle", "fsdp_params", "unit", "self")
"""Variables that may hold the gathered or reduced parameters, the most exact first."""
PHASES = (
    "forward",
    "backward",
)  # Phases taken from the trainer; in its ``optimizer`` phase the caller decides


@dataclass
class Call:
    """One collective of one rank."""

    number: int
    phase: str
    microbatch: int | None  # Within the step, from 1; None outside forward and backward
    collective: str
    dtype: str
    size_bytes: (
        int  # Of the full tensor: an all-gather's output, a reduce-scatter's input
    )
    gives_bytes: int  # Input of this rank
    gets_bytes: int  # New data on this rank afterwards
    sends_bytes: float  # Sent by a rank on average, on a ring; by this rank in an uneven all-to-all
    ranks: int
    group: str  # The description of the process group
    site: str  # Innermost calling function outside torch.distributed
    # Parameters whose values or gradients it moves, if known
    parameters: list[str] = field(default_factory=list)


class Origins:
    """Finds callers, and names the parameters of a wrapped model; ``within`` maps a function to its
    calls' phase."""

    def __init__(self, model: nn.Module, within: dict[CodeType, str]) -> None:
        self._within = within
        self.named = [
            (_own_name(name), param) for name, param in model.named_parameters()
        ]
        self._names: dict[Tensor, str] = {param: name for name, param in self.named}
        self._modules = {
            module: _own_name(name) for name, module in model.named_modules()
        }

    def find(self, phase: str) -> tuple[str, str, list[str]]:
        """Caller as ``module.function``, with the last part of the module's name, phase, and
        parameters.

        Outside forward and backward the functions on the stack decide the phase.
        """
        site, found, parameters, in_autograd = "", None, None, False
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_name
            if not site:
                in_autograd |= module == "torch.autograd.graph"
                if not module.startswith(PASSED_BY) and not name.startswith(
                    ("<", "__")
                ):
                    site = (
                        f"{module.rpartition('.')[2]}.{name}"
                        if not in_autograd
                        else "C++, in the backward"
                    )
            found = found or self._within.get(frame.f_code)
            parameters = parameters or self._carried(frame)
            frame = frame.f_back
        return site, phase if phase in PHASES else found or "other", parameters or []

    @torch.no_grad()
    def stored_in(self, sets: Iterable[list[Tensor]]) -> list[str]:
        """Parameters stored within tensors."""
        spans = [
            (
                tensor.data_ptr(),
                tensor.data_ptr() + tensor.numel() * tensor.element_size(),
            )
            for tensors in sets
            for tensor in tensors
            if tensor.numel()
        ]
        found = []
        for name, param in self.named:
            local = param.to_local() if isinstance(param, DTensor) else param
            if local.numel() and any(
                low <= local.data_ptr() < high for low, high in spans
            ):
                found.append(name)
        return found

    def _carried(self, frame: FrameType) -> list[str]:
        if not set(CARRIERS).intersection(frame.f_code.co_varnames):
            return []
        values = frame.f_locals
        for value in (values[carrier] for carrier in CARRIERS if carrier in values):
            if isinstance(value, dist.GradBucket):
                return self._names_of(value.parameters())
            unit = getattr(value, "unit", value)
            names = self._names_of(getattr(unit, "params", None), values.get("indices"))
            if names or (names := self._native_names(value)):
                return names
        return []

    def _names_of(self, params: Any, indices: list[int] | None = None) -> list[str]:
        """Names of parameters, or of objects with ``homes``: a parameter's modules and names
        there."""
        if not isinstance(params, list):
            return []
        names = []
        for param in (
            params if indices is None else [params[index] for index in indices]
        ):
            if isinstance(param, Tensor):
                names.append(self._names.get(param, ""))
            elif hasattr(param, "homes"):
                module, name = param.homes[0]
                names.append(f"{self._modules[module]}.{name}".lstrip("."))
        return [name for name in names if name]

    def _native_names(self, value: Any) -> list[str]:
        """Names of a unit's parameters from private attributes of PyTorch's FSDP, torch 2.7 to
        2.13."""
        try:
            flat = getattr(value, "flat_param", None)
            if isinstance(flat, nn.Parameter):  # FSDP1's handle of a unit
                module = self._modules.get(value._fully_sharded_module, "")
                return [
                    f"{module}.{_own_name(name)}".lstrip(".") for name in flat._fqns
                ]  # type: ignore[attr-defined]
            group = (
                value
                if isinstance(value, list)
                else getattr(value, "fsdp_params", None) or []
            )
            return [
                _own_name(param._param_fqn)
                for param in group
                if getattr(param, "_param_fqn", None)
            ]
        except (AttributeError, TypeError):
            return []


def _own_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


class CollectiveTrace(TorchDispatchMode):
    """Records the collectives of one step, and passes them to ``done`` after it.

    Args:
        model: names the parameters.
        within: function → phase of the calls within it, for the trainer's phase ``optimizer``.
    """

    def __init__(
        self,
        step: int,
        model: nn.Module,
        within: dict[CodeType, str],
        done: Callable[[list[Call]], None],
    ) -> None:
        super().__init__()
        self.step, self._done = step, done
        self.calls: list[Call] = []
        self._origins = Origins(model, within)
        self._phase, self._microbatch = "other", 0
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
        self._done(self.calls)

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
            for argument, value in given(arguments_of(func), args, kwargs)
        }
        group = _group(values)
        ranks, rank = group.size(), group.rank()
        sets = [found for value in args if (found := list(tensors_in(value)))]
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
        named = [
            (name, param.grad)
            for name, param in self._origins.named
            if param.grad is not None
        ]
        local = [
            (name, grad.to_local() if isinstance(grad, DTensor) else grad)
            for name, grad in named
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
    named = values["group_name"]
    return (
        named
        if isinstance(named, dist.ProcessGroup)
        else dist.distributed_c10d._resolve_process_group(named)
    )


def traced_step(first: int, last: int) -> int:
    """The recorded step: the third of the run, or its last.

    DDP's reducers and FSDP's units learn their order in the first step and at the start of the
    second.
    """
    return min(first + 2, last)
