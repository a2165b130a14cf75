"""Detection of loss spikes.

A loss is compared with the median of the last finite losses, in units of their median absolute
deviation: the robust z-score of Iglewicz and Hoaglin, How to Detect and Handle Outliers (ASQC
Quality Press, 1993). Unlike mean and standard deviation, neither depends on a few outliers. A
falling loss has negative scores; while it falls fast, the deviation is large and hides small
spikes.
"""

import math
import statistics
from typing import Any

WINDOW = 64
"""Number of earlier losses to compare with."""

FEWEST = 16
"""Fewest earlier losses for a score."""

SIGMAS_PER_DEVIATION = 1.4826
"""Standard deviation over median absolute deviation of a normal distribution."""

LEAST_SIGMA_NATS = 0.01
"""Lower bound of the standard deviation, which is 0 for a constant loss. At a threshold of 8, a
jump of less than 0.08 nats (8% of the perplexity) is never a spike."""


class SpikeDetector:
    """Scores the losses of a run in order; a score above the threshold is a spike, and a threshold
    of 0 disables it.

    It is deterministic, so ranks with equal losses agree.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._losses: list[float] = []
        self._in_a_row = 0

    def score(self, loss: float) -> float | None:
        """Score a loss in nats and add it to the window, unless it is a spike, which would widen
        the deviation.

        ``FEWEST`` spikes in a row are a new level of the loss, and clear the window.

        Returns:
            Robust standard deviations above the median; None for a non-finite loss, with fewer than
            ``FEWEST`` earlier losses, and with a threshold of 0.
        """
        if not self._threshold or not math.isfinite(loss):
            return None
        score = None
        if len(self._losses) >= FEWEST:
            median = statistics.median(self._losses)
            deviation = statistics.median(abs(other - median) for other in self._losses)
            score = (loss - median) / max(
                SIGMAS_PER_DEVIATION * deviation, LEAST_SIGMA_NATS
            )
        if score is None or score <= self._threshold:
            self._losses = [*self._losses, loss][-WINDOW:]
            self._in_a_row = 0
        else:
            self._in_a_row += 1
            if self._in_a_row == FEWEST:
                self._losses = []
                self._in_a_row = 0
        return score

    def spike(self, loss: float) -> float | None:
        """Call ``score``, and return the score if it is a spike, else None."""
        score = self.score(loss)
        return score if score is not None and score > self._threshold else None

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON types, which keep floats exactly."""
        return {"losses": list(self._losses), "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the output of ``state_dict``."""
        self._losses = [float(loss) for loss in state["losses"]]
        self._in_a_row = int(state["in_a_row"])
