"""Callers of collectives, and the parameters that a collective moves.

The call stack shows the caller, and often the parameters: the gathered or reduced unit, bucket or
share is a variable of one of the functions. Otherwise the addresses of the tensors may match
parameters; else they stay unnamed. PyTorch's FSDP has no public way from a collective to its unit;
only ``_native_names`` reads private attributes.
"""

import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
PHASES = ("forward", "backward")
"""Phases taken from the trainer; in its ``optimizer`` phase the caller decides."""


class Origins:
    """Finds callers, and names the parameters of a wrapped model; ``within`` maps a function to its
    calls' phase."""

    def __init__(self, model: nn.Module, within: dict[CodeType, str]) -> None:
        self._within = within
        self.named_params = [
            (_own_name(name), param) for name, param in model.named_parameters()
        ]
        self._names: dict[Tensor, str] = {
            param: name for name, param in self.named_params
        }
        self._modules = {
            module: _own_name(name) for name, module in model.named_modules()
        }

    def find(self, phase: str) -> tuple[str, str, list[str]]:
        """Caller as ``module.function``, with the last part of the module's name, phase, and
        parameters.

        Outside forward and backward the functions on the stack decide the phase.
        """
        site = ""
        caller_phase = None
        parameters = None
        in_autograd = False
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            module = str(frame.f_globals.get("__name__"))
            name = frame.f_code.co_name
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
            caller_phase = caller_phase or self._within.get(frame.f_code)
            parameters = parameters or self._carried(frame)
            frame = frame.f_back
        return (
            site,
            phase if phase in PHASES else caller_phase or "other",
            parameters or [],
        )

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
        names = []
        for name, param in self.named_params:
            local = param.to_local() if isinstance(param, DTensor) else param
            if local.numel() and any(
                low <= local.data_ptr() < high for low, high in spans
            ):
                names.append(name)
        return names

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
                names: list[str] = flat._fqns  # type: ignore[attr-defined]
                return [f"{module}.{_own_name(name)}".lstrip(".") for name in names]
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
