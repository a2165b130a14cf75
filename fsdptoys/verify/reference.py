"""The plain loop's numbers, and how far its rounding takes them from a wider computation.

Rounding is measured, not chosen. The plain loop runs once more in float64 (float32 for bfloat16),
and the distance between both is the rounding error of the narrow computation. Rounding errors
behave like independent random numbers around 0 (Higham and Mary, A new approach to probabilistic
rounding error analysis, 2019), so two computations in one dtype differ by sqrt(2) of that on
average. ``DEVIATIONS`` such standard deviations, which rounding exceeds once in 500 million times,
are allowed. A model that does not compute in the wider dtype runs sequence by sequence instead,
which adds up gradients in another order.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from fsdptoys.config.schema import Config

from .measure import Array, Key
from .plain import Split, Trajectory, train_plain

NEGLIGIBLE = 1e-4
"""Share of the norm of all gradients to which differences of a smaller gradient are relative."""
DEVIATIONS = 6
ALLOWED = DEVIATIONS * math.sqrt(2)
"""Allowed difference of two computations, in units of the rounding error of one."""
UNIT = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}
"""Relative distance of two neighbors in a dtype."""


@dataclass
class Reference:
    """A plain run, with the rounding error of each of its numbers."""

    trajectory: Trajectory
    loss_rounding: float
    """Relative, the largest of all steps."""
    norm_rounding: float
    rounding: dict[Key, float]
    """Of each tensor: the norm of its difference from the wider computation, relative to
    ``sizes``."""
    worst: dict[tuple[int, str], float]
    """Step and kind → the largest of tensors so far, without those that are rounding alone."""
    sizes: dict[Key, float]
    """Norm of each tensor; of a gradient at least ``NEGLIGIBLE`` of all gradients."""
    noise: set[str]
    """Parameters with gradients of rounding alone, such as biases of keys."""
    unit: float

    def allowed(self, key: Key) -> float:
        """Relative difference of a tensor that rounding explains."""
        step, label = key
        if step == 0:
            return 0.0
        kind, _, name = label.rpartition(" ")
        own = self.rounding[key]
        if name in self.noise:
            return max(ALLOWED * max(own, self.unit), 2 * self._moved(key, name))
        return ALLOWED * max(own, self.worst.get((step, kind), 0.0), self.unit)

    def _moved(self, key: Key, name: str) -> float:
        """How far updates in a direction of chance have moved a parameter, relative to its norm."""
        initial = self.trajectory.tensors[0, f"initial value of {name}"]
        if key[1] != f"parameter {name}":
            return 0.0
        moved = np.linalg.norm(self.trajectory.tensors[key] - initial)
        return float(moved) / max(self.sizes[key], 1e-30)

    @property
    def allowed_loss(self) -> float:
        """Relative difference of a loss that rounding explains."""
        return ALLOWED * max(self.loss_rounding, self.unit)

    @property
    def allowed_norm(self) -> float:
        """Likewise of a gradient norm."""
        return ALLOWED * max(self.norm_rounding, self.unit)


def train_reference(config: Config, split: Split, device: torch.device) -> Reference:
    """Run the plain loop and its wider form.

    Args:
        config: of a run of one process, validated.
        split: of the global batch.
        device: where it computes.
    """
    dtype = config.parallel.param_dtype.torch
    wider = torch.float64 if dtype is torch.float32 else torch.float32
    plain = train_plain(config, split, device, dtype)
    try:
        wide = train_plain(config, split, device, wider)
    except (RuntimeError, TypeError, NotImplementedError):
        # A model without float64: sums in another order have rounding errors of the same size
        sequences = split.ranks * split.batch_size
        single = Split(sequences, split.microbatches, 1)
        wide = train_plain(config, single, device, dtype)
    sizes: dict[Key, float] = {}
    rounding: dict[Key, float] = {}
    noise: set[str] = set()
    for key, values in plain.tensors.items():
        step, label = key
        size = _norm(values)
        difference = _norm(values.astype(np.float64) - wide.tensors[key])
        if label.startswith("gradient of "):
            if difference > size / 2:
                noise.add(label.removeprefix("gradient of "))
            size = max(size, NEGLIGIBLE * plain.norms[step - 1])
        sizes[key] = size
        rounding[key] = difference / max(size, 1e-30)
    return Reference(
        plain,
        largest_relative(plain.losses, wide.losses),
        largest_relative(plain.norms, wide.norms),
        rounding,
        _worst_so_far(rounding, noise),
        sizes,
        noise,
        UNIT[dtype],
    )


def _worst_so_far(
    rounding: dict[Key, float], noise: set[str]
) -> dict[tuple[int, str], float]:
    """Return the largest rounding error of each kind of tensors up to each step."""
    worst: dict[tuple[int, str], float] = {}
    so_far: dict[str, float] = {}
    for (step, label), share in sorted(rounding.items(), key=lambda item: item[0][0]):
        kind, _, name = label.rpartition(" ")
        if name not in noise:
            so_far[kind] = max(so_far.get(kind, 0.0), share)
        worst[step, kind] = so_far.get(kind, 0.0)
    return worst


def largest_relative(values: list[float], expected: list[float]) -> float:
    """Largest relative difference of two lists of numbers; infinite if one is nan."""
    differences = [
        abs(a - b) / max(abs(b), 1e-30) for a, b in zip(values, expected, strict=True)
    ]
    largest = max(differences, default=0.0)
    return float("inf") if any(share != share for share in differences) else largest


def _norm(values: "Array | np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> float:
    return float(np.linalg.norm(values.astype(np.float64)))
