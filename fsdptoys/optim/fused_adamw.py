"""PyTorch's fused AdamW over local tensors, with clipping and the decision to skip a step in its
kernel.

``torch.optim.AdamW(fused=True)`` takes DTensors too, but dispatches each operator through them, at
many times the host time of a step on their local tensors. The kernel reads two scalars on the
device, under the names of PyTorch's gradient scaler: ``grad_scale`` divides the gradients, which
then need no pass of their own to be clipped, and ``found_inf=1`` leaves parameters, moments and
step counts unchanged, so that the host need not know whether a step is skipped.

Not covered: AMSGrad, sparse gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import AdamW, adamw

from fsdptoys.utils.dtensor import local_tensors

from .vector_adamw import pads, split_vectors

IGNORED_ON = frozenset({"npu"})
"""Devices whose kernel ignores ``grad_scale`` and ``found_inf``.

Source: https://github.com/Ascend/op-plugin (op_plugin/ops/opapi/FusedAdamWKernelNpuOpApi.cpp)
"""


class FusedAdamW(AdamW):
    """``torch.optim.AdamW(fused=True)`` for dense parameters, DTensors included."""

    grad_scale: Tensor | None = None
    """Divides the gradients of the next step, in place; a float32 scalar on their device. None
    leaves them."""
    found_inf: Tensor | None = None
    """1 skips the next step; a float32 scalar on the parameters' device. None never skips."""

    @property
    def skips_on_device(self) -> bool:
        """Whether a step obeys ``grad_scale`` and ``found_inf``; on a CPU the host reads a flag
        without a wait."""
        device = self.param_groups[0]["params"][0].device
        return device.type not in IGNORED_ON and not pads(device)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(
                [param for param in group["params"] if param.grad is not None], group
            )
        return loss

    def _update(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        states = [self.state[param] or self._make_state(param) for param in params]
        grads: list[Any] = [param.grad for param in params]
        averages, squares, steps = (
            [state[name] for state in states]
            for name in ("exp_avg", "exp_avg_sq", "step")
        )
        averages, squares = local_tensors(averages), local_tensors(squares)
        self._run(
            group, local_tensors(params), local_tensors(grads), averages, squares, steps
        )

    def _make_state(self, param: nn.Parameter) -> dict[str, Any]:
        step = torch.zeros((), device=param.device)
        zeros = torch.zeros_like(param), torch.zeros_like(param)
        self.state[param] = {"step": step, "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}
        return self.state[param]

    def _run(self, group: dict[str, Any], *columns: list[Tensor]) -> None:
        """Update local tensors with a group's hyperparameters: parameters, gradients, both moments,
        step counts."""
        remainders: list[tuple[Tensor, Tensor]] = []
        split = list(columns)
        if group["fused"] and columns[0] and pads(columns[0][0].device):
            split, remainders = split_vectors(columns)
        params, grads, averages, squares, steps = split
        beta1, beta2 = group["betas"]
        adamw(
            params, grads, averages, squares, [], steps,
            fused=group["fused"], foreach=group["foreach"],
            grad_scale=self.grad_scale, found_inf=self.found_inf,
            amsgrad=False, beta1=beta1, beta2=beta2,
            lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
        for view, copy in remainders:
            view.copy_(copy[: view.numel()])
