"""Losses that should agree and do not: rows that train the same, in another layout or with other memory switches.

Rows are held against each other where model, data and their order, optimizer, schedule, seeds, number formats, samples
of a step, device and PyTorch are the same. Their learning rates and valid tokens must then be equal, and losses and
gradient norms closer than rounding explains. How far that goes was measured (``FINE``, ``COARSE``). Rounding grows with
the steps, since Adam divides by gradients that are small, so what is allowed grows with the step, and a mistake that
shows late must be larger to be seen. Losses alone would miss a gradient of the wrong size, to which clipping and Adam
are blind; its norm does not.

Held-out losses are compared where both rows have one over the same samples.

Rows are not compared where it is not known what they did before: those that went on from a checkpoint of other settings
or of another folder.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdptoys.metrics import StepMetrics
from fsdptoys.metrics.config import RESUMES_FILE
from fsdptoys.metrics.resume_log import read_resumes
from fsdptoys.train.recorded_run import RecordedRun
from fsdptoys.utils.text import value_text

from .runs_table import Record
from .setting_diff import Settings
from .setting_effects import Effect, bits_of, effect_of, held_out_samples, rounds_coarsely, training_of

HELD_OUT = "held-out loss"


@dataclass(frozen=True)
class Tolerance:
    """Relative differences that rounding explains: at the start, growing with the steps, and at most."""

    loss: float
    grad_norm: float
    grows_over: float
    """Steps after which as much again is allowed as at the start."""
    most_loss: float
    most_grad_norm: float

    def at(self, quantity: str, step: int) -> float:
        """What is allowed at a step; nothing of what is no sum."""
        if quantity == HELD_OUT:
            quantity, step = "loss", step + 1  # it is taken after the update
        base, most = {
            "loss": (self.loss, self.most_loss),
            "gradient norm": (self.grad_norm, self.most_grad_norm),
        }.get(quantity, (0.0, 0.0))
        return min(most, base * (1 + step / self.grows_over))


EXACT = Tolerance(0.0, 0.0, 1.0, 0.0, 0.0)
"""Of runs with ``train.deterministic=true``, whose kernels see the same micro-batches."""

FINE = Tolerance(loss=1e-5, grad_norm=1e-4, grows_over=5.0, most_loss=0.01, most_grad_norm=0.1)
"""Of sums of float32 numbers.

Measured on CPUs, with chunked loss, fused AdamW, other micro-batches: 2e-7 in losses and 2e-6 in norms after 100 steps,
8e-6 and 9e-5 after 300 (0.1M parameters, learning rate 4e-3); 2e-6 and 1e-5 after 10 for other micro-batches of a
larger model. A learning rate 1% too high is 1e-4 off after 3 steps, a gradient of twice the size at once in its norm.
"""

COARSE = Tolerance(loss=1e-3, grad_norm=1.5e-2, grows_over=1.0, most_loss=0.1, most_grad_norm=0.5)
"""Where bfloat16 numbers are added up, or rounded at random, and where a token may go to another expert by a last bit.

Measured likewise: 7e-3 in losses and 9e-2 in norms after 300 steps; with a learning rate of 1e-2 and no warm-up 2e-3
and 2e-2 after 4, 5e-3 and 5e-2 after 10, 2e-2 and 1.4e-1 after 60.
"""

QUANTITIES: dict[str, Callable[[StepMetrics], float | None]] = {
    "valid tokens": lambda step: step.valid_tokens,
    "learning rate": lambda step: step.learning_rate,
    "loss": lambda step: step.loss,
    "gradient norm": lambda step: step.grad_norm,
    HELD_OUT: lambda step: step.eval_loss,
}
"""What is compared, in the order in which a step decides it; None where a step has none."""


@dataclass(frozen=True)
class Disagreement:
    """Where a row first differs from the rows that it should agree with."""

    name: str
    reference: str
    """The row that it is held against: the first of those that most others agree with."""
    quantity: str
    step: int
    value: float
    expected: float
    """The reference's."""
    difference: float
    """Relative; infinite where one of the two is not a number."""
    allowed: float

    @property
    def sentence(self) -> str:
        """For people."""
        shown = f"{self.difference:.1e} relative" if math.isfinite(self.difference) else "they are not both finite"
        allowed = f"rounding explains {self.allowed:.1e}" if self.allowed else "they must be equal"
        return (
            f"{value_text(self.name)} does not agree with {value_text(self.reference)}, which trains the same: from "
            f"step {self.step} on, its {self.quantity} is {self.value:.8g} and not {self.expected:.8g} ({shown}; "
            f"{allowed})."
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


@dataclass(frozen=True)
class _Row:
    """A row with all that pairs of rows ask for, made once."""

    name: str
    steps: dict[int, StepMetrics]
    bits: str | None
    """The same for rows whose bits are equal; None for one that promises none."""
    quantities: tuple[str, ...]
    numbers: npt.NDArray[np.int64]
    """Of its steps, ascending."""
    values: npt.NDArray[np.float64]
    """A line each step, a column each quantity."""
    known: npt.NDArray[np.bool_]
    """Where there is a value."""
    allowed: npt.NDArray[np.float64]
    """Where bits are not equal."""

    @property
    def content(self) -> tuple[object, ...]:
        """The same for rows that no row can tell apart."""
        return self.bits, self.numbers.tobytes(), self.values.tobytes(), self.known.tobytes()


def find_disagreements(records: Sequence[Record]) -> list[Disagreement]:
    """Every row that differs from those that it should agree with."""
    groups: dict[str, list[_Row]] = {}
    held_out: dict[tuple[str, tuple[Any, Any]], list[_Row]] = {}
    training = tuple(quantity for quantity in QUANTITIES if quantity != HELD_OUT)
    for record in records:
        if record.run is not None and record.run.steps:
            key = _key(record.run)
            if key is None:
                continue
            groups.setdefault(key, []).append(_row(record.name, record.run, training))
            samples = held_out_samples(record.run.tree, record.run.world_size)
            if samples is not None and any(metrics.eval_loss is not None for metrics in record.run.steps):
                held_out.setdefault((key, samples), []).append(_row(record.name, record.run, (HELD_OUT,)))
    found = {each.name: each for group in groups.values() for each in _in_group(group)}
    for rows in held_out.values():
        # Apart from the others: a row without held-out losses of these samples agrees with all that have some.
        rest = [row for row in rows if row.name not in found]
        found |= {each.name: each for each in (_in_group(rest) if rest else [])}
    return [found[record.name] for record in records if record.name in found]


def relative_difference(value: float, expected: float) -> float:
    """How far two numbers are apart, as a share of the larger; two that are no numbers are as good as equal."""
    if value == expected or (math.isnan(value) and math.isnan(expected)):
        return 0.0
    if not (math.isfinite(value) and math.isfinite(expected)):
        return math.inf
    return abs(value - expected) / max(abs(value), abs(expected))


def _key(run: RecordedRun) -> str | None:
    """The same for runs that should agree; None for one whose past is not known."""
    settings = training_of(run.tree, run.world_size)
    if settings is None or run.steps[0].step != 1 or not _keeps_its_training(run):
        return None
    versions = run.environment.get("versions")
    # The text of Python's own library is data too (data.files=[stdlib]).
    parts = [versions.get(name) for name in ("torch", "python")] if isinstance(versions, dict) else []
    return repr(([*sorted(_texts(settings))], run.device_type, run.device_name, parts))


def _texts(settings: Settings) -> list[tuple[str, str]]:
    return [(key, value_text(value)) for key, value in settings.items()]


def _keeps_its_training(run: RecordedRun) -> bool:
    """Whether every start of the run went on with settings that round alike at most."""
    for resume in read_resumes(run.path / RESUMES_FILE):
        if resume.step == 0:
            continue  # all that is recorded came after it
        if resume.changed is None or resume.world_size_before not in (None, resume.world_size):
            return False
        if any(effect_of(key) <= Effect.format for key in resume.changed):
            return False
    return True


def _row(name: str, run: RecordedRun, quantities: tuple[str, ...]) -> _Row:
    steps = {metrics.step: metrics for metrics in sorted(run.steps, key=lambda metrics: metrics.step)}
    read = [[QUANTITIES[quantity](metrics) for quantity in quantities] for metrics in steps.values()]
    bits = bits_of(run.tree, run.world_size, run.device_type)
    settings = training_of(run.tree, run.world_size)
    tolerance = COARSE if settings is not None and rounds_coarsely(settings) else FINE
    return _Row(
        name=name,
        steps=steps,
        bits=repr(sorted(_texts(bits))) if bits is not None else None,
        quantities=quantities,
        numbers=np.array(list(steps), dtype=np.int64),
        values=np.array([[math.nan if value is None else value for value in line] for line in read], dtype=np.float64),
        known=np.array([[value is not None for value in line] for line in read], dtype=np.bool_),
        allowed=np.array([[tolerance.at(quantity, step) for quantity in quantities] for step in steps]),
    )


def _in_group(group: Sequence[_Row]) -> list[Disagreement]:
    """Of rows that should all agree, those that do not agree with the one that most others agree with."""
    alike: dict[tuple[object, ...], list[_Row]] = {}
    for row in group:
        alike.setdefault(row.content, []).append(row)
    classes = list(alike.values())
    friends = [len(each) for each in classes]
    for one, rows in enumerate(classes):
        for other in range(one):
            if _first_difference(rows[0], classes[other][0]) is None:
                friends[one] += len(classes[other])
                friends[other] += len(rows)
    reference = classes[friends.index(max(friends))][0]
    found = [_first_difference(row, reference) for row in group if row is not reference]
    return [each for each in found if each is not None]


def _first_difference(row: _Row, reference: _Row) -> Disagreement | None:
    common = row.numbers
    ours = theirs = np.arange(len(common))
    if not np.array_equal(common, reference.numbers):
        common, ours, theirs = np.intersect1d(row.numbers, reference.numbers, assume_unique=True, return_indices=True)
    exact = row.bits is not None and row.bits == reference.bits
    allowed = np.zeros_like(row.allowed[ours]) if exact else row.allowed[ours]
    known = row.known[ours] & reference.known[theirs]
    over = known & (_relative_differences(row.values[ours], reference.values[theirs]) > allowed)
    if not over.any():
        return None
    line, column = divmod(int(over.argmax()), len(row.quantities))
    step, quantity = int(common[line]), row.quantities[column]
    read = QUANTITIES[quantity]
    value, expected = read(row.steps[step]), read(reference.steps[step])
    assert value is not None and expected is not None
    difference = relative_difference(value, expected)
    return Disagreement(
        row.name, reference.name, quantity, step, value, expected, difference, float(allowed[line, column])
    )


def _relative_differences(
    values: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """:func:`relative_difference` of each pair."""
    with np.errstate(all="ignore"):
        shares = np.abs(values - expected) / np.maximum(np.abs(values), np.abs(expected))
    shares[~(np.isfinite(values) & np.isfinite(expected))] = math.inf
    shares[(values == expected) | (np.isnan(values) & np.isnan(expected))] = 0.0
    return shares
