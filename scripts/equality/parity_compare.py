"""Differences between a training run and a reference: losses, gradients by kind of parameter,
norms, parameters, from the sums of ``fsdptoys.verify.measure``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsdptoys.verify.measure import Arrays, Sums

NOISE = 1e-4
"""Share of the norm of all gradients up to which a gradient counts as rounding: a bias of keys has
none but this."""
KINDS = ("embedding", "attention", "mlp", "experts", "router", "norms", "head")
PARAMETERS = 0
"""In place of a step: the final parameters."""


@dataclass
class Trajectory:
    """Numbers of a training run to compare."""

    losses: list[float]
    norms: list[float]
    gradients: dict[int, Arrays]
    """Step → name → full gradient before clipping."""
    parameters: Arrays

    def tensors(self) -> dict[tuple[int, str], npt.NDArray[np.float32]]:
        """Gradients by step and name, then parameters."""
        grads = {
            (step, name): grad
            for step, arrays in self.gradients.items()
            for name, grad in arrays.items()
        }
        return grads | {
            (PARAMETERS, name): param for name, param in self.parameters.items()
        }


class Difference(NamedTuple):
    """Something that is not equal in every bit."""

    step: int
    column: str
    sentence: str
    size: float
    """Relative difference."""


@dataclass
class Comparison:
    """A row against the reference."""

    loss_difference: float
    """Largest relative difference of a loss; infinite if one is nan."""
    differences: list[Difference] = field(default_factory=list)
    """In the order of a step: loss, gradients, norm; then parameters."""
    cells: dict[str, str] = field(default_factory=dict)
    """Column → the first difference; missing for none."""

    def note(self, difference: Difference, cell: str) -> None:
        """Add a difference."""
        self.differences.append(difference)
        self.cells.setdefault(difference.column, cell)

    def first(self, step: int | None = None, over: float = 0.0) -> str:
        """The first difference, at ``step`` if given, of more than ``over``; empty for none.

        A wrong loss comes first. Gradients of one step are found together; the one that differs
        most is named, since the backward spreads an error to all earlier layers.
        """
        differences = [
            difference
            for difference in self.differences
            if difference.size > over and step in (None, difference.step)
        ]
        if not differences:
            return ""
        first = differences[0]
        if first.column in KINDS:
            gradients = [
                difference
                for difference in differences
                if difference.step == first.step and difference.column in KINDS
            ]
            first = max(gradients, key=attrgetter("size"))
        return f"step {first.step}: {first.sentence}"


def kind_of(name: str) -> str:
    """Kind of a parameter, by its name."""
    parts = name.split(".")
    if "norm" in parts[-2]:
        return "norms"
    kinds = {
        "attn": "attention",
        "experts": "experts",
        "router": "router",
        "lm_head": "head",
    }
    for part, kind in kinds.items():
        if part in parts:
            return kind
    return "embedding" if parts[0].startswith("embed") else "mlp"


def compare(
    losses: Sequence[float],
    norms: Sequence[float],
    sums: dict[tuple[int, str], Sums],
    reference: Trajectory,
) -> Comparison:
    """Compare with a reference in the order of a step."""
    result = Comparison(
        max(_relative(a, b) for a, b in zip(losses, reference.losses, strict=True))
    )
    for step, (loss, expected) in enumerate(
        zip(losses, reference.losses, strict=True), 1
    ):
        if loss != expected:
            size = _relative(loss, expected)
            sentence = f"loss {loss:.9g} instead of {expected:.9g}"
            result.note(
                Difference(step, "loss", sentence, size), f"{size:.0e} at {step}"
            )
        norm = norms[step - 1]
        expected = reference.norms[step - 1]
        for name, grad in reference.gradients.get(step, {}).items():
            _note_tensor(
                result,
                kind_of(name),
                step,
                f"gradient of {name}",
                sums[step, name],
                grad,
                NOISE * expected,
            )
        if norm != expected:
            size = _relative(norm, expected)
            sentence = f"gradient norm {norm:.9g} instead of {expected:.9g}"
            result.note(
                Difference(step, "norm", sentence, size), f"{size:.0e} at {step}"
            )
    for name, param in reference.parameters.items():
        _note_tensor(
            result,
            "parameters",
            len(losses),
            f"parameter {name}",
            sums[PARAMETERS, name],
            param,
        )
    return result


def _note_tensor(
    result: Comparison,
    column: str,
    step: int,
    name: str,
    sums: Sums,
    expected: npt.NDArray[np.float32],
    least: float = 1e-30,
) -> None:
    if sums.elements < expected.size:
        result.note(
            Difference(step, column, f"{name} is missing", math.inf), f"none at {step}"
        )
    elif sums.unequal:
        copies = sums.elements / expected.size
        size = float(np.linalg.norm(expected))
        ratio = math.sqrt(sums.squares / copies) / max(size, 1e-30)
        difference = math.sqrt(sums.differences / copies) / max(size, least)
        difference = math.inf if math.isnan(difference) else difference
        sentence = f"{name} has {ratio:.6g} times the norm, and differs by {difference:.1e} of it"
        cell = (
            f"{ratio:.4g}× at {step}"
            if abs(ratio - 1) > 1e-3
            else f"{difference:.0e} at {step}"
        )
        result.note(Difference(step, column, sentence, difference), cell)


def _relative(value: float, expected: float) -> float:
    difference = abs(value - expected) / abs(expected)
    return math.inf if math.isnan(difference) else difference
