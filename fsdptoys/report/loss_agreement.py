"""Find rows whose losses should agree and do not: the same training with another layout or other
memory switches.

Rows are compared if model, data and its order, optimizer, schedule, seeds, dtypes, samples a step,
device, PyTorch and Python are the same. Learning rates and valid tokens must then be equal; losses
and gradient norms may differ by rounding, within measured tolerances (``FINE``, ``COARSE``).
Rounding differences grow with the steps, since Adam divides by small gradients, so tolerances grow
too and a bug that shows late must be larger to be found. Gradient norms are compared because
clipping and Adam hide a gradient of the wrong scale from the losses.

Held-out losses are compared if both rows have them over the same samples. Runs with an unknown past
are left out: those that resumed from a checkpoint of other settings or another folder.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdptoys.metrics import StepMetrics
from fsdptoys.metrics.config import RESUMES_FILE
from fsdptoys.metrics.resume_log import read_resumes
from fsdptoys.train.recorded_run import RecordedRun
from fsdptoys.utils.options import Effect
from fsdptoys.utils.text import value_text

from .runs_table import Record
from .setting_diff import Settings
from .setting_effects import (
    bits_of,
    effect_of,
    held_out_samples,
    rounds_coarsely,
    training_of,
)

HELD_OUT = "held-out loss"


@dataclass(frozen=True)
class Tolerance:
    """Relative differences attributed to rounding: initial value, growth with the steps, and
    maximum."""

    loss: float
    grad_norm: float
    grows_over: float  # Steps after which the initial tolerance is added again
    most_loss: float
    most_grad_norm: float

    def at(self, quantity: str, step: int) -> float:
        """Tolerance of a quantity at a step; 0 for learning rates and valid tokens."""
        if quantity == HELD_OUT:
            quantity, step = "loss", step + 1  # evaluated after the optimizer step
        growth = 1 + step / self.grows_over
        if quantity == "gradient norm":
            return min(self.most_grad_norm, self.grad_norm * growth)
        return min(self.most_loss, self.loss * growth) if quantity == "loss" else 0.0


FINE = Tolerance(
    loss=1e-5, grad_norm=1e-4, grows_over=5.0, most_loss=0.01, most_grad_norm=0.1
)
"""For sums in float32.

Measured on CPUs with chunked loss, fused AdamW and other micro-batches: 2e-7 in losses and 2e-6 in
norms after 100 steps, 8e-6 and 9e-5 after 300 (0.1M parameters, learning rate 4e-3); 2e-6 and 1e-5
after 10 for other micro-batches of a larger model. For comparison: a learning rate 1% too high
differs by 1e-4 after 3 steps, and a doubled gradient shows in the first norm.
"""

COARSE = Tolerance(
    loss=1e-3, grad_norm=1.5e-2, grows_over=1.0, most_loss=0.1, most_grad_norm=0.5
)
"""For bfloat16 sums, stochastic rounding, float8, and experts, whose routing one bit can change.

Measured in the same way: 7e-3 in losses and 9e-2 in norms after 300 steps; with a learning rate of
1e-2 and no warm-up 2e-3 and 2e-2 after 4, 5e-3 and 5e-2 after 10, 2e-2 and 1.4e-1 after 60.
"""

QUANTITIES: dict[str, Callable[[StepMetrics], float | None]] = {
    "valid tokens": lambda step: step.valid_tokens,
    "learning rate": lambda step: step.learning_rate,
    "loss": lambda step: step.loss,
    "gradient norm": lambda step: step.grad_norm,
    HELD_OUT: lambda step: step.eval_loss,
}
"""Compared quantities, in the order in which a step determines them; None for a step without the
value."""


@dataclass(frozen=True)
class Disagreement:
    """First difference between a row and the reference that it should agree with."""

    name: str
    reference: str  # Name of the first row with which most others agree
    quantity: str
    step: int
    value: float
    expected: float  # Value of the reference
    difference: float  # Relative; infinite if one value is not finite
    allowed: float

    @property
    def sentence(self) -> str:
        """The disagreement as one sentence."""
        difference = (
            f"{self.difference:.1e} relative"
            if math.isfinite(self.difference)
            else "they are not both finite"
        )
        allowed = (
            f"rounding explains {self.allowed:.1e}"
            if self.allowed
            else "they must be equal"
        )
        return (
            f"{value_text(self.name)} does not agree with {value_text(self.reference)}, which "
            f"trains the same: from step {self.step} on, its {self.quantity} is {self.value:.8g} "
            f"and not {self.expected:.8g} ({difference}; {allowed})."
        )


@dataclass(frozen=True)
class Difference:
    """Values of one quantity at one step."""

    step: int
    first: float
    second: float

    @property
    def absolute(self) -> float:
        """Absolute difference; infinite unless both values are finite."""
        apart = abs(self.first - self.second)
        return apart if math.isfinite(apart) else math.inf

    @property
    def relative(self) -> float:
        """Difference relative to the larger magnitude; 0 for two NaNs, infinite if otherwise not
        both are finite."""
        if self.first == self.second or (
            math.isnan(self.first) and math.isnan(self.second)
        ):
            return 0.0
        largest = max(abs(self.first), abs(self.second))
        return self.absolute / largest if math.isfinite(largest) else math.inf


@dataclass(frozen=True)
class _Row:
    """A row with arrays computed once for all pairs."""

    name: str
    steps: dict[int, StepMetrics]
    # Equal for rows that must be bitwise equal; None without ``train.deterministic``
    bits: str | None
    quantities: tuple[str, ...]
    numbers: npt.NDArray[np.int64]  # Step numbers, ascending
    values: npt.NDArray[np.float64]  # [steps, quantities]; NaN for a missing value
    has_value: npt.NDArray[np.bool_]  # [steps, quantities]: whether there is a value
    # [steps, quantities]: tolerance for rows that need not be bitwise equal
    allowed: npt.NDArray[np.float64]


def find_disagreements(records: Sequence[Record]) -> list[Disagreement]:
    """Find every row that differs from its reference, in the order of the records."""
    groups: dict[str, list[_Row]] = {}
    held_out: dict[tuple[str, tuple[Any, Any]], list[_Row]] = {}
    training = tuple(quantity for quantity in QUANTITIES if quantity != HELD_OUT)
    for record in records:
        run = record.run
        if run is None or not run.steps or (key := _key(run)) is None:
            continue
        groups.setdefault(key, []).append(_row(record.name, run, training))
        samples = held_out_samples(run.tree, run.world_size)
        if samples is not None and any(
            metrics.eval_loss is not None for metrics in run.steps
        ):
            held_out.setdefault((key, samples), []).append(
                _row(record.name, run, (HELD_OUT,))
            )
    disagreements: dict[str, Disagreement] = {}
    for group in groups.values():
        disagreements |= _in_group(group)
    for rows in held_out.values():
        # Grouped separately: a row without held-out losses on these samples would agree with all
        # rows.
        rest = [row for row in rows if row.name not in disagreements]
        if rest:
            disagreements |= _in_group(rest)
    return [
        disagreements[record.name] for record in records if record.name in disagreements
    ]


def _key(run: RecordedRun) -> str | None:
    """Equal for runs that should agree; None for a run with an unknown past."""
    settings = training_of(run.tree, run.world_size)
    if settings is None or run.steps[0].step != 1 or not _keeps_its_training(run):
        return None
    versions = run.environment.get("versions")
    # Python's version matters because its library can be training data (data.files=[stdlib]).
    parts = (
        [versions.get(name) for name in ("torch", "python")]
        if isinstance(versions, dict)
        else []
    )
    return repr((_texts(settings), run.device_type, run.device_name, parts))


def _texts(settings: Settings) -> list[tuple[str, str]]:
    return sorted((key, value_text(value)) for key, value in settings.items())


def _keeps_its_training(run: RecordedRun) -> bool:
    """Whether no resume changed the world size, or a setting with more effect than rounding."""
    for resume in read_resumes(run.path / RESUMES_FILE):
        if resume.step == 0:
            continue  # all recorded steps are later
        if resume.changed is None or resume.world_size_before not in (
            None,
            resume.world_size,
        ):
            return False
        if any(effect_of(key) <= Effect.format for key in resume.changed):
            return False
    return True


def _row(name: str, run: RecordedRun, quantities: tuple[str, ...]) -> _Row:
    steps = {
        metrics.step: metrics
        for metrics in sorted(run.steps, key=lambda metrics: metrics.step)
    }
    read = [
        [QUANTITIES[quantity](metrics) for quantity in quantities]
        for metrics in steps.values()
    ]
    bits = bits_of(run.tree, run.world_size, run.device_type)
    settings = training_of(run.tree, run.world_size)
    tolerance = COARSE if settings is not None and rounds_coarsely(settings) else FINE
    return _Row(
        name=name,
        steps=steps,
        bits=repr(_texts(bits)) if bits is not None else None,
        quantities=quantities,
        numbers=np.array(list(steps), dtype=np.int64),
        values=np.array(read, dtype=np.float64),  # None becomes NaN
        has_value=np.array(
            [[value is not None for value in line] for line in read], dtype=np.bool_
        ),
        allowed=np.array(
            [
                [tolerance.at(quantity, step) for quantity in quantities]
                for step in steps
            ]
        ),
    )


def _in_group(group: Sequence[_Row]) -> dict[str, Disagreement]:
    """Compare rows that should all agree with the one that most others agree with.

    Returns:
        Name → disagreement of each row that differs.
    """
    # Rows with identical comparisons to all others
    alike: dict[tuple[object, ...], list[_Row]] = {}
    for row in group:
        content = (
            row.bits,
            row.numbers.tobytes(),
            row.values.tobytes(),
            row.has_value.tobytes(),
        )
        alike.setdefault(content, []).append(row)
    classes = list(alike.values())
    agreeing = [len(rows) for rows in classes]
    for one, rows in enumerate(classes):
        for other in range(one):
            if _first_difference(rows[0], classes[other][0]) is None:
                agreeing[one] += len(classes[other])
                agreeing[other] += len(rows)
    reference = classes[agreeing.index(max(agreeing))][0]
    disagreements = {
        row.name: _first_difference(row, reference)
        for row in group
        if row is not reference
    }
    return {name: first for name, first in disagreements.items() if first is not None}


def _first_difference(row: _Row, reference: _Row) -> Disagreement | None:
    common = row.numbers
    indices = reference_indices = np.arange(len(common))
    if not np.array_equal(common, reference.numbers):
        common, indices, reference_indices = np.intersect1d(
            row.numbers, reference.numbers, assume_unique=True, return_indices=True
        )
    exact = row.bits is not None and row.bits == reference.bits
    allowed = np.zeros_like(row.allowed[indices]) if exact else row.allowed[indices]
    comparable = row.has_value[indices] & reference.has_value[reference_indices]
    differences = _relative_differences(
        row.values[indices], reference.values[reference_indices]
    )
    over = comparable & (differences > allowed)
    if not over.any():
        return None
    line, column = divmod(int(over.argmax()), len(row.quantities))
    step = int(common[line])
    quantity = row.quantities[column]
    value = QUANTITIES[quantity](row.steps[step])
    expected = QUANTITIES[quantity](reference.steps[step])
    assert value is not None and expected is not None
    sizes = float(differences[line, column]), float(allowed[line, column])
    return Disagreement(
        row.name, reference.name, quantity, step, value, expected, *sizes
    )


def _relative_differences(
    values: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Relative to the larger magnitudes; 0 for two NaNs, infinite if otherwise not both are
    finite."""
    with np.errstate(all="ignore"):
        shares = np.abs(values - expected) / np.maximum(
            np.abs(values), np.abs(expected)
        )
    shares[~(np.isfinite(values) & np.isfinite(expected))] = math.inf
    shares[(values == expected) | (np.isnan(values) & np.isnan(expected))] = 0.0
    return shares
