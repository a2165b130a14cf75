"""From a model on the meta device to one with memory and initial values."""

import torch
from torch import nn

from fsdptoys.models import DecoderModel

from .initialise import Fill


def materialise(model: DecoderModel, device: torch.device, fill: Fill) -> None:
    """Give every parameter memory on ``device`` and its initial values, one after the other.

    Parameters that several modules share stay shared. Sharded parameters (DTensors) get memory for their shard only.
    """
    shared = shared_parameters(model)
    model.to_empty(device=device)
    for alias, name in shared.items():
        owner, _, attribute = alias.rpartition(".")
        setattr(model.get_submodule(owner), attribute, model.get_parameter(name))
    for name, param in model.named_parameters():
        fill(param, name)


def shared_parameters(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter that has several → its first name."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first[param]
        for name, param in model.named_parameters(remove_duplicate=False)
        if first.setdefault(param, name) != name
    }


def init_buffers(model: DecoderModel, device: torch.device, dtype: torch.dtype) -> None:
    """Let the model compute its buffers on ``device`` and cast those of floating point."""
    model.init_buffers(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
