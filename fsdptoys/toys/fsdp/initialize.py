"""Memory and initial values, one module at a time, for a model sharded on the meta device.

A model too large for one device is constructed under ``torch.device("meta")`` and sharded. Each module then draws its
whole parameters as its constructor would, and every rank keeps its part. With the same seed on all ranks, the values
are those of an ordinary construction, bit for bit, if modules draw in the order in which they are registered, as
constructors usually do. A rank holds its shards and one module's parameters at most.

Not covered: values that a model draws after all its modules are constructed; call ``initialize`` again with a ``draw``
for those.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .core import hooks_of
from .hooks import FullHooks
from .unit import FullUnit


def reset(module: Any) -> None:
    """Draw a module's own parameters as its constructor does, with the method that most modules of PyTorch have."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


@torch.no_grad()
def initialize(model: nn.Module, device: torch.device | str, draw: Callable[[nn.Module], None] = reset) -> None:
    """Give a sharded model values, and memory if it has none.

    Args:
        model: root of the units.
        device: of the mesh.
        draw: fills a module's own parameters in place, and its buffers; called once for every module that has any.
    """
    if any(param.is_meta for param in model.parameters()):
        model.to_empty(device=device)
    places: dict[nn.Parameter, tuple[FullUnit, int]] = {}
    for module in model.modules():
        hooks = hooks_of(module)
        if isinstance(hooks, FullHooks):
            if any(hooks.unit.outers):
                raise NotImplementedError("initialize() is not for DTensors as parameters: call reset_parameters()")
            places |= {param.sharded: (hooks.unit, index) for index, param in enumerate(hooks.unit.params)}
    for module in model.modules():
        sharded = {name: param for name, param in module.named_parameters(recurse=False) if param in places}
        for name, param in sharded.items():
            unit, _ = places[param]
            whole = torch.empty(param.shape, dtype=param.dtype, device=unit.shard_S.device)
            module._parameters[name] = nn.Parameter(whole, param.requires_grad)
        if sharded or any(True for _ in module.buffers(recurse=False)):
            draw(module)
        for name, param in sharded.items():
            unit, index = places[param]
            drawn = module.get_parameter(name)
            # As where one module's parameter replaces another's: the first module's values of a shared one are kept.
            if unit.params[index].homes[0] == (module, name):
                piece = unit.pieces[index]
                piece.local_view(unit.shard_S, unit.rank).copy_(piece.local_part(drawn, unit.rank))
            module._parameters[name] = param
