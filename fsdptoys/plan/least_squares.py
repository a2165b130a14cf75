"""Minimize a sum of squares within limits: damped Gauss-Newton steps, and jumps of single factors.

Source: Levenberg-Marquardt (https://doi.org/10.1137/0111030).
"""

import itertools
import math
from collections.abc import Callable

import numpy as np

STEP = 0.01  # Step in the logarithm of a factor, for derivatives
ITERATIONS = 30
JUMPS = tuple(math.log(2) * halves / 2 for halves in (-4, -2, -1, 1, 2, 4))
"""Trial moves of single rates: a rate that bounds nothing at the current point has no derivative,
but may matter further away."""
Residuals = Callable[[np.ndarray], np.ndarray]


def move_factor(
    point: np.ndarray, limits: np.ndarray, index: int, jump: float
) -> np.ndarray:
    """A copy of a point with one factor moved, within its limits."""
    moved = point.copy()
    moved[index] = np.clip(point[index] + jump, *limits[index])
    return moved


def minimize(residuals: Residuals, limits: np.ndarray) -> np.ndarray:
    """Minimize the sum of squares within limits, starting from zero: descend, and jump where that
    leads lower."""
    point = np.zeros(len(limits))
    value = residuals(point)
    for _ in range(len(limits) + 1):
        point, value = _descend(residuals, limits, point, value)
        best = point
        best_value = value
        for index, jump in itertools.product(range(len(point)), JUMPS):
            moved = move_factor(point, limits, index, jump)
            new = residuals(moved)
            if new @ new < 0.99 * (best_value @ best_value):
                best = moved
                best_value = new
        if best is point:
            break
        point = best
        value = best_value
    return point


def _descend(
    residuals: Residuals, limits: np.ndarray, point: np.ndarray, value: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Damped Gauss-Newton steps until nothing is gained."""
    damping = 1e-3
    for _ in range(ITERATIONS):
        steps = np.diag(np.where(point + STEP <= limits[:, 1], STEP, -STEP))
        jacobian = np.stack(
            [(residuals(point + step) - value) / step.sum() for step in steps], axis=1
        )
        gradient = jacobian.T @ value
        # Factors at a limit that would leave it stay fixed in this step.
        free = ~(
            ((point <= limits[:, 0]) & (gradient > 0))
            | ((point >= limits[:, 1]) & (gradient < 0))
        )
        if not free.any():
            break
        square = jacobian[:, free].T @ jacobian[:, free]
        while damping < 1e9:
            step = np.zeros_like(point)
            step[free] = np.linalg.solve(
                square + damping * np.diag(np.diag(square)), -gradient[free]
            )
            moved = np.clip(point + step, limits[:, 0], limits[:, 1])
            new = residuals(moved)
            if new @ new < value @ value:
                break
            damping *= 10
        else:
            break
        gained = value @ value - new @ new
        point, value, damping = moved, new, max(damping / 10, 1e-9)
        if gained < 1e-4 * (value @ value) + 1e-6:
            break
    return point, value
