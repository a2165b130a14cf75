"""Memory and initial values for a model that was sharded on the meta device, one module at a time.

A model too large for one device is made under ``torch.device("meta")``, which costs nothing, and sharded; then each
module draws its whole parameters as its constructor would have, of which every rank keeps its part. With the same seed
on all ranks that is the model that an ordinary construction makes, bit for bit, if modules draw in the order in which
they are registered, as constructors usually do. A rank never has more than its shards and one module's parameters.

Not covered: values that a model draws after all its modules are made; call ``initialise`` once more with a function
that draws those.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .hooks import driver_of
from .internals import register
from .unit import Unit


def reset(module: Any) -> None:
    """Draw a module's own parameters as its constructor does: most modules of PyTorch have a method for that."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


@torch.no_grad()
def initialise(model: nn.Module, device: torch.device | str, draw: Callable[[nn.Module], None] = reset) -> None:
    """Give a sharded model memory, if it has none, and values.

    Args:
        model: on which ``fully_shard`` was called, units and root.
        device: of the mesh.
        draw: fills a module's own parameters in place, and its buffers; called once for every module that has any.
    """
    if any(param.is_meta for param in model.parameters()):
        model.to_empty(device=device)
    places: dict[nn.Parameter, tuple[Unit, int]] = {}
    for module in model.modules():
        driver = driver_of(module)
        if driver is not None:
            if any(driver.unit.shard.outers):
                raise NotImplementedError("initialise() is not for DTensors as parameters: call reset_parameters()")
            places |= {param.sharded: (driver.unit, index) for index, param in enumerate(driver.unit.params)}
    for module in model.modules():
        sharded = {name: param for name, param in module.named_parameters(recurse=False) if param in places}
        for name, param in sharded.items():
            unit, _ = places[param]
            whole = torch.empty(param.shape, dtype=param.dtype, device=unit.device)
            register(module, name, nn.Parameter(whole, param.requires_grad))
        if sharded or any(True for _ in module.buffers(recurse=False)):
            draw(module)
        for name, param in sharded.items():
            unit, index = places[param]
            drawn = module.get_parameter(name)
            # A shared parameter keeps what the first of its modules drew, and the others draw for nothing: so it is
            # where one module's parameter takes the place of another's.
            if unit.params[index].homes[0] == (module, name):
                unit.shard.view(index).copy_(unit.shard.cut(index, drawn))
            register(module, name, param)
