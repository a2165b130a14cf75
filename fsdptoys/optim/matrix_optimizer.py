"""An optimizer that updates some matrices its own way and leaves all other parameters to AdamW.

Both are one ``torch.optim.Optimizer`` to schedules and checkpoints: AdamW is built over the other groups, whose
settings and states it shares. What is a matrix here, the subclass's groups say.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdptoys.utils.dtensor import (
    local_tensor,
)

MATRICES = "matrices"
"""Key of a parameter group: whether it is of the matrices that are updated another way."""

Groups = list[dict[str, Any]]


class BesideAdamW(torch.optim.Optimizer):
    """Its own update over groups that say so, and AdamW over the others.

    Args:
        groups: parameter groups, each with ``lr``, ``weight_decay`` and ``MATRICES``; all others' keys are AdamW's.
        build_adamw: constructs AdamW over the other groups.
    """

    def __init__(self, groups: Groups, build_adamw: Callable[[Groups], torch.optim.Optimizer]) -> None:
        others = [group for group in groups if not group[MATRICES]]
        # It writes its settings into these groups, which both have from now on.
        self._adamw = build_adamw(others) if others else None
        super().__init__(groups, {})

    @abstractmethod
    def make_matrix_states(self, param: nn.Parameter) -> dict[str, Any]:
        """What the first update of a matrix starts from."""

    @abstractmethod
    def step_matrices(self, group: dict[str, Any]) -> None:
        """Update the matrices of a group that have a gradient."""

    def state_dict(self) -> dict[str, Any]:
        """As PyTorch's, with the states that the first step would start from."""
        self.make_states()
        return super().state_dict()

    @torch.no_grad()
    def make_states(self) -> None:
        """Give every parameter the states that it lacks."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if state:
                    continue
                if group[MATRICES]:
                    state.update(self.make_matrix_states(param))
                else:
                    on_device = group["fused"] or group["capturable"]
                    state["step"] = torch.zeros((), device=local_tensor(param).device if on_device else "cpu")
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.make_states()
        for group in self.param_groups:
            if group[MATRICES]:
                self.step_matrices(group)
        if self._adamw is not None:
            # Loading replaces both.
            self._adamw.param_groups = [group for group in self.param_groups if not group[MATRICES]]
            self._adamw.state = self.state
            self._adamw.step()
        return loss
