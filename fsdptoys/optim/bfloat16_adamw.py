"""AdamW with both moments in bfloat16: 4 bytes of states per element of a parameter instead of 8.

An update makes float32 copies of one parameter's moments, updates with them as PyTorch does, and rounds them to
nearest. It takes 8 bytes of scratch per element of the largest parameter, and rounds alike on all layouts. Rounding to
nearest drops changes below half the distance to the next number, so betas too close to 1 are refused
(``adamw.LARGEST_BFLOAT16_BETA``).

Not covered: parameters not in float32, AMSGrad, several parameters in one kernel, stochastic rounding
(``memory.offload_state_dtype`` has it).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import AdamW, adamw

from fsdptoys.utils.dtensor import local_tensor

from .vector_adamw import VectorUpdate

MOMENTS = ("exp_avg", "exp_avg_sq")


class BFloat16AdamW(AdamW):
    """``torch.optim.AdamW`` with bfloat16 states, for dense parameters, DTensors included."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[param]
        local = local_tensor(param)
        on_cpu = local.device.type == "cpu"
        if not state:
            state["step"] = torch.zeros((), device=local.device if group["fused"] else "cpu")
            for name in MOMENTS:
                state[name] = torch.zeros_like(param, dtype=torch.bfloat16)
        kept = [local_tensor(state[name]) for name in MOMENTS]
        moments = [moment.float() for moment in kept]
        tensors = [local, local_tensor(param.grad), *moments]  # type: ignore[arg-type]
        if group["fused"] and on_cpu:
            updates = VectorUpdate()
            updates.add(tensors, state["step"])
            updates.run(group)
        else:
            beta1, beta2 = group["betas"]
            adamw(
                [tensors[0]], [tensors[1]], [tensors[2]], [tensors[3]], [], [state["step"]],
                foreach=group["foreach"], fused=group["fused"], amsgrad=False, beta1=beta1, beta2=beta2,
                lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            )  # fmt: skip
        for moment, rounded in zip(moments, kept, strict=True):
            rounded.copy_(moment)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """PyTorch's, which casts states to the parameters' dtype; here cast back to bfloat16."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in MOMENTS:
                if name in state:
                    state[name] = state[name].to(torch.bfloat16)
