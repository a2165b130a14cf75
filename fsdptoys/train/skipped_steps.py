"""Counts of skipped steps, and the loss scale that some of them search for.

An overflow at a scale above 1, with a finite loss, belongs to float16's search for its loss scale:
the next step has a lower scale. Such a step is counted in all, but for no limit
(``train.max_skipped``, ``train.max_skipped_in_a_row``).
"""

import math
from typing import Any

from fsdptoys.optim.loss_scale import LossScaler


class SkippedSteps:
    """Steps without an update because a loss or a gradient was not finite.

    Args:
        scaler: finds the loss scale; None for dtypes that need none.
    """

    def __init__(self, scaler: LossScaler | None) -> None:
        self.scaler = scaler
        self.in_all = self.in_a_row = self._expected = 0
        self.limited = False
        """Whether the last step counts for the limits."""

    @property
    def in_all_limited(self) -> int:
        """``in_all`` without the search for the loss scale."""
        return self.in_all - self._expected

    def record(self, loss: float, *, overflowed: bool, skipped: bool) -> None:
        """Count a step, and choose the loss scale of the next one.

        Args:
            loss: of the global batch.
            overflowed: whether gradients of any rank were not finite.
            skipped: whether the step was skipped, for either reason.
        """
        expected = False
        if self.scaler is not None:
            expected = overflowed and math.isfinite(loss) and self.scaler.can_help
            self.scaler.update(overflowed)
        self.in_all += skipped
        self._expected += expected
        self.limited = skipped and not expected
        self.in_a_row = self.in_a_row + self.limited if skipped else 0

    def state_dict(self) -> dict[str, Any]:
        """Counts and loss scale, as JSON values."""
        return {
            "skipped_steps": self.in_all,
            "skipped_in_a_row": self.in_a_row,
            "expected_skips": self._expected,
            "loss_scale": self.scaler.state_dict() if self.scaler else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a ``state_dict``, also of a version without float16 or of a run in another
        dtype."""
        self.in_all = state["skipped_steps"]
        self.in_a_row = state["skipped_in_a_row"]
        self._expected = state.get("expected_skips", 0)
        if self.scaler and (saved := state.get("loss_scale")) is not None:
            self.scaler.load_state_dict(saved)
