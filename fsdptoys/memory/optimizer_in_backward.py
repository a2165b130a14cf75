"""Updates each parameter in the backward, as soon as its gradient is whole, and frees the gradient at once.

The gradients of a model are otherwise all there when the optimizer begins. Here few are at a time: of one process those
of an operator, under FSDP2 the shards of a unit, which it reduces to and updates on its reducing stream while the
backward goes on. Updates are those of the ordinary step in every bit, since the optimizers that are taken know one
element, or one parameter, at a time.

What it costs: gradients cannot be scaled by their norm, nor left out where another turns out not to be finite, since
they are gone when that is known; and none can be added to them. The norm is told all the same, from the sums of squares
that each leaves.

Not covered: strategies that hold gradients until the backward ends (DDP's buckets, FSDP1, replicas of FSDP2), Muon,
offload of states or parameters.
Source: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class OptimizerInBackward:
    """Takes the steps of an optimizer from now on, parameter by parameter.

    FSDP2 calls the hooks on gradients of plain parameters for its shards too; found so in torch 2.13.

    Args:
        optimizer: with element-wise updates; its settings and states stay where they are.
        params: all that it updates, in the order in which norms are added up.
        measure: gives the norms of the parts of a gradient.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Iterable[nn.Parameter],
        measure: Callable[[Tensor], list[Tensor]],
    ) -> None:
        self._optimizer, self._params, self._measure = optimizer, list(params), measure
        self._group = {
            param: number for number, group in enumerate(optimizer.param_groups) for param in group["params"]
        }
        self._norms: dict[nn.Parameter, list[Tensor]] = {}
        for param in self._params:
            param.register_post_accumulate_grad_hook(self._update)

    @torch.no_grad()
    def _update(self, param: Tensor) -> None:
        assert isinstance(param, nn.Parameter) and param.grad is not None
        assert param not in self._norms, "a second gradient in one step"
        self._norms[param] = self._measure(param.grad)
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        optimizer.param_groups = [{**groups[self._group[param]], "params": [param]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        param.grad = None

    def take_norms(self) -> list[Tensor]:
        """Norms of the parts of all gradients of the backward that ended; the next one begins anew."""
        assert all(param.grad is None for param in self._params), "a gradient of which no hook was told"
        norms = [norm for param in self._params for norm in self._norms.get(param, [])]
        self._norms.clear()
        return norms
