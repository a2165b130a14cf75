"""SGD and AdamW from scratch: the update of one tensor, and an optimizer that applies it to each
parameter.

    SGD      gradient + decay·w ──→ buffer = momentum·buffer + gradient ──→ w −= lr·buffer
    AdamW    w ·= 1 − lr·decay;  mean, mean square of gradients ──→ w −= lr·mean / (√square + eps)

Weight decay is part of SGD's gradient, and so of its momentum. AdamW decays the weight itself
("decoupled"), as a division by √square would otherwise undo the decay of weights with large
gradients.

Both work element by element: a rank that holds a slice of a parameter computes that slice's bits,
which ZeRO and FSDP rest on. SGD keeps 4 bytes a float32 element (none without momentum), AdamW 8.

Operators and their order are those of ``torch.optim`` with ``foreach=False``, hence the bits. Left
out: dampening, AMSGrad, maximizing, sparse gradients, fused and multi-tensor forms.
Sources: arXiv:1412.6980 (Adam), arXiv:1711.05101 (decoupled decay)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def sgd_update(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    lr: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
) -> None:
    """Update a tensor in place; ``state`` is empty before the first step and keeps the momentum
    buffer."""
    if weight_decay:
        grad = grad.add(param, alpha=weight_decay)
    if momentum:
        if "buffer" in state:
            state["buffer"].mul_(momentum).add_(grad)
        else:
            state["buffer"] = grad.clone()
        grad = grad.add(state["buffer"], alpha=momentum) if nesterov else state["buffer"]
    param.add_(grad, alpha=-lr)


def adamw_update(
    param: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update a tensor in place; ``state`` is empty before step 1 and keeps the two averages."""
    if not state:
        state.update(mean=torch.zeros_like(param), square=torch.zeros_like(param))
    mean = state["mean"]
    square = state["square"]
    param.mul_(1 - lr * weight_decay)
    mean.lerp_(grad, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    # Both averages begin at zero; division by 1 − beta^step makes up for that.
    root = (square.sqrt() / (1 - betas[1] ** step) ** 0.5).add_(eps)
    param.addcdiv_(mean, root, value=-lr / (1 - betas[0] ** step))


class ToyOptimizer(torch.optim.Optimizer):
    """Calls ``update`` for every parameter with a gradient; groups, ``zero_grad`` and hooks are
    PyTorch's."""

    def update(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Update one parameter."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters; return the loss of ``closure``, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param], group)
        return loss


class SGD(ToyOptimizer):
    """Stochastic gradient descent with momentum and weight decay in the gradient."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov},
        )

    def update(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Update one parameter."""
        sgd_update(
            param,
            grad,
            state,
            group["lr"],
            group["momentum"],
            group["weight_decay"],
            group["nesterov"],
        )


class AdamW(ToyOptimizer):
    """Adam with decoupled weight decay."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def update(
        self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Update one parameter."""
        state["step"] = state.get("step", 0) + 1
        averages = state.setdefault("averages", {})
        adamw_update(
            param,
            grad,
            averages,
            state["step"],
            group["lr"],
            group["betas"],
            group["eps"],
            group["weight_decay"],
        )
