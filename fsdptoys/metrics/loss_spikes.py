"""Losses that stand out from those just before them.

A loss is held against the median of the last finite ones, in units of their median absolute deviation: the robust
z-score of Iglewicz and Hoaglin, How to Detect and Handle Outliers (ASQC Quality Press, 1993). Unlike mean and standard
deviation, neither moves with the outlier itself or with an earlier one. A falling loss only lowers its scores; while it
falls fast, the fall itself widens the deviation and hides small jumps.
"""

import math
import statistics
from typing import Any

WINDOW = 64
"""Losses that a new one is held against."""

FEWEST = 16
"""Losses that must be there before any is judged."""

SIGMAS_PER_DEVIATION = 1.4826
"""Standard deviation over median absolute deviation, of normally distributed numbers."""

LEAST_SIGMA_NATS = 0.01
"""Losses are taken to vary by no less: a constant loss has no deviation, and at a threshold of 8 a jump of less than
0.08 nats, 8% of a perplexity, is no spike however quiet the run."""


class SpikeDetector:
    """Scores the losses of a run, one after the other; equal on every rank that is given the same losses.

    Args:
        threshold: a score above it is a spike; 0 for none.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._losses: list[float] = []
        self._in_a_row = 0

    def score(self, loss: float) -> float | None:
        """Score a loss in nats and take it in, unless it is a spike, which would widen what comes after.

        After ``FEWEST`` spikes in a row the loss is taken to have a new level, and the judgement begins anew.

        Returns:
            Robust standard deviations above the median; None for a loss that is not finite, before there are enough,
            and with a threshold of 0.
        """
        if not self._threshold or not math.isfinite(loss):
            return None
        score = None
        if len(self._losses) >= FEWEST:
            median = statistics.median(self._losses)
            deviation = statistics.median(abs(other - median) for other in self._losses)
            score = (loss - median) / max(SIGMAS_PER_DEVIATION * deviation, LEAST_SIGMA_NATS)
        if score is None or score <= self._threshold:
            self._losses = [*self._losses, loss][-WINDOW:]
            self._in_a_row = 0
        else:
            self._in_a_row += 1
            if self._in_a_row == FEWEST:
                self._losses, self._in_a_row = [], 0
        return score

    def spike(self, loss: float) -> float | None:
        """Take a loss in as ``score`` does, and return its score if it is a spike."""
        score = self.score(loss)
        return score if score is not None and score > self._threshold else None

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on, as JSON keeps it without rounding."""
        return {"losses": list(self._losses), "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the losses that were seen before."""
        self._losses = [float(loss) for loss in state["losses"]]
        self._in_a_row = int(state["in_a_row"])
