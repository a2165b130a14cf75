"""An optimizer with its own update for some matrices, and AdamW for all other parameters.

Both are one ``torch.optim.Optimizer`` to schedules and checkpoints: AdamW is built over the other
groups, and shares their settings and states.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdptoys.utils.dtensor import local_tensor

MATRICES = "matrices"
"""Key of a parameter group: whether it has the matrices with their own update."""

Groups = list[dict[str, Any]]


class MatrixOptimizer(torch.optim.Optimizer):
    """Its own update over groups with ``MATRICES``, AdamW over the others.

    Args:
        groups: parameter groups, each with ``lr``, ``weight_decay`` and ``MATRICES``; other keys
            are AdamW's.
        build_adamw: constructs AdamW over the other groups.
    """

    def __init__(
        self, groups: Groups, build_adamw: Callable[[Groups], torch.optim.Optimizer]
    ) -> None:
        others = [group for group in groups if not group[MATRICES]]
        # AdamW writes its settings into these groups, which both share.
        self._adamw = build_adamw(others) if others else None
        super().__init__(groups, {})

    @abstractmethod
    def make_matrix_states(self, param: nn.Parameter) -> dict[str, Any]:
        """Initial states of a matrix."""

    @abstractmethod
    def step_matrices(self, group: dict[str, Any]) -> None:
        """Update the matrices of a group that have a gradient."""

    def state_dict(self) -> dict[str, Any]:
        """PyTorch's, with initial states before the first step."""
        self.make_states()
        return super().state_dict()

    @torch.no_grad()
    def make_states(self) -> None:
        """Create missing states."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if state:
                    continue
                if group[MATRICES]:
                    state.update(self.make_matrix_states(param))
                else:
                    on_device = group["fused"] or group["capturable"]
                    state["step"] = torch.zeros(
                        (), device=local_tensor(param).device if on_device else "cpu"
                    )
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)

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
            # load_state_dict replaces both.
            self._adamw.param_groups = [
                group for group in self.param_groups if not group[MATRICES]
            ]
            self._adamw.state = self.state
            self._adamw.step()
        return loss
