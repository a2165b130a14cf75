"""Float64 copies of float32 parameters, for strategies without shards.

With ``train.deterministic=layout`` a model computes from float64 parameters (``exact.ops``). Its
leaves are copies. Their gradients add up over micro-batches, and over ranks, in float64; the
optimizer gets the float32 parameters, and gradients that were rounded once. FSDP1 and FSDP2 gather
in float64 instead. The price: 16 bytes more for each parameter.
"""

from collections.abc import Iterator

import torch
from torch import nn


class Float64Leaves:
    """Replaces the parameters of a materialized model by float64 copies."""

    def __init__(self, model: nn.Module) -> None:
        self._fresh: set[nn.Parameter] = set()
        self._parameters: dict[nn.Parameter, nn.Parameter] = {}
        leaves: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            own = dict(module.named_parameters(recurse=False))
            for name, param in own.items():
                if param not in leaves:
                    leaves[param] = nn.Parameter(
                        param.detach().double(), param.requires_grad
                    )
                    self._parameters[leaves[param]] = param
                setattr(module, name, leaves[param])
            if own:
                module.register_forward_pre_hook(self._refresh)
        model.register_forward_pre_hook(lambda *_: self._fresh.clear(), prepend=True)

    def parameter(self, leaf: nn.Parameter) -> nn.Parameter:
        """The float32 parameter of a leaf."""
        return self._parameters[leaf]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._parameters)

    @torch.no_grad()
    def _refresh(self, module: nn.Module, *_: object) -> None:
        """Copy parameters before the first forward that uses them, since a step may update them as
        late as that.

        Not in a recomputation, for which they have not changed.
        """
        for leaf in module.parameters(recurse=False):
            if leaf not in self._fresh:
                self._fresh.add(leaf)
                leaf.copy_(self._parameters[leaf])

    @torch.no_grad()
    def move_gradients(self) -> None:
        """Round the gradients of a step, and give them to the parameters."""
        for leaf, param in self._parameters.items():
            if leaf.grad is not None:
                param.grad, leaf.grad = leaf.grad.to(param.dtype), None
