"""Updates each parameter in the backward, as soon as its gradient is final, and frees the gradient
at once.

Few gradients exist at a time: in one process those of an operator, under FSDP2 the shards of a
unit, which it reduces and updates on its reduce stream during the backward. Every bit equals the
ordinary step's, since the supported optimizers work on one element, or one parameter, at a time.

The price: gradients are gone before all are known, so they cannot be scaled by their norm, skipped
because another one is not finite, or accumulated. The norm is still reported, from the sums of
squares of each gradient.

Not covered: strategies that hold gradients until the backward ends (DDP's buckets, FSDP1, replicas
of FSDP2), Muon, offload of states or parameters.
Source: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from .optimizer_stepper import GradientNorms, OptimizerStepper


class OptimizerInBackward(OptimizerStepper):
    """Takes the steps of an element-wise optimizer parameter by parameter, by hooks on gradients.

    FSDP2 runs such hooks on its shards too (seen in torch 2.13). Norms (``measure``) are added up
    in the order of ``params``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Iterable[nn.Parameter],
        measure: Callable[[Tensor], list[Tensor]],
    ) -> None:
        super().__init__(optimizer)
        self._params = list(params)
        self._measure = measure
        self._group = {
            param: number
            for number, group in enumerate(optimizer.param_groups)
            for param in group["params"]
        }
        self._norms: dict[nn.Parameter, list[Tensor]] = {}
        self.before_update(self._keep_norm)
        for param in self._params:
            param.register_post_accumulate_grad_hook(self._update)

    def _keep_norm(self, param: nn.Parameter, grad: Tensor) -> None:
        assert param not in self._norms, "a second gradient in one step"
        self._norms[param] = self._measure(grad)

    @torch.no_grad()
    def _update(self, param: Tensor) -> None:
        assert isinstance(param, nn.Parameter)
        optimizer = self.optimizer
        groups = optimizer.param_groups
        optimizer.param_groups = [{**groups[self._group[param]], "params": [param]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        param.grad = None

    def clip(
        self, norms: GradientNorms, max_norm: float, unscale: float = 1.0
    ) -> Tensor:
        """Norm of the gradients, which are gone: ``max_norm`` has no effect. A collective."""
        assert unscale == 1, (
            "updates in the backward cannot wait for the decision to skip the step"
        )
        assert all(param.grad is None for param in self._params), (
            "a gradient without a call of its hook"
        )
        parts = [norm for param in self._params for norm in self._norms.get(param, [])]
        self._norms.clear()
        return norms.total_norm(parts)

    def _step(self, skip: Tensor | None) -> None:
        """Do nothing: the backward has taken the step."""
