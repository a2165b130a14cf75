"""The verdict on a row: equal in every bit, within rounding, or the first tensor that differs."""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np

from .measure import Key, Sums
from .reference import Reference


class Outcome(Enum):
    """Kinds of verdicts."""

    equal = "equal in every bit"
    within = "within"
    differs = "differs"
    refused = "refused"
    failed = "failed"

    @property
    def is_fault(self) -> bool:
        """Whether sharding has changed something, or training has failed."""
        return self in (Outcome.differs, Outcome.failed)


@dataclass
class Verdict:
    """What came of a row."""

    outcome: Outcome
    sentence: str = ""
    """Of a difference, a refusal or a failure."""
    shares: dict[str, float] = field(default_factory=dict)
    """Figure → largest relative difference; empty for rows that were not trained."""
    step: int | None = None
    """The first step that differs; 0 before the first one."""
    tensor: str | None = None
    """The first tensor that differs."""

    @property
    def short_text(self) -> str:
        """The verdict without its sentence."""
        if self.outcome is Outcome.within:
            return f"within {max(self.shares.values()):.1e}"
        return self.outcome.value

    @property
    def text(self) -> str:
        """The verdict with its sentence."""
        return (
            f"{self.short_text}: {self.sentence}" if self.sentence else self.short_text
        )


@dataclass
class Figures:
    """What a row's ranks measured."""

    losses: list[float]
    norms: list[float]
    sums: dict[Key, Sums]


class Excess(NamedTuple):
    """A tensor that differs by more than rounding explains."""

    key: Key
    share: float
    allowed: float
    sentence: str

    @property
    def ratio(self) -> float:
        """Difference in units of the allowed one."""
        return self.share / self.allowed if self.allowed else math.inf


def judge(figures: Figures, reference: Reference, first_step: int = 1) -> Verdict:
    """Compare a row with the plain loop in the order of a step: loss, gradients, norm, parameters.

    Args:
        figures: of the row.
        reference: of the same global batches.
        first_step: first step of the row, which may have resumed.
    """
    plain = reference.trajectory
    shares = {"loss": 0.0, "gradients": 0.0, "norm": 0.0, "parameters": 0.0}
    excesses: list[Excess] = []
    bits = True
    kinds = recorded_kinds(figures)
    for key, sums in figures.sums.items():
        step, label = key
        kind, _, name = label.rpartition(" ")
        if (step, kind) not in kinds:
            continue
        share, sentence = _difference(key, sums, reference)
        if share == 0:
            continue
        bits = False
        allowed = reference.allowed(key)
        if not share <= allowed:
            excesses.append(Excess(key, share, allowed, sentence))
        column = "gradients" if kind == "gradient of" else "parameters"
        if name not in reference.noise or not share <= allowed:
            shares[column] = max(shares[column], share)
    for step, loss, norm in zip(
        range(first_step, len(plain.losses) + 1),
        figures.losses,
        figures.norms,
        strict=True,
    ):
        loss_share = _relative(loss, plain.losses[step - 1])
        norm_share = _relative(norm, plain.norms[step - 1])
        bits = bits and loss_share == norm_share == 0
        shares["loss"] = max(shares["loss"], loss_share)
        shares["norm"] = max(shares["norm"], norm_share)
        of_step = [excess for excess in excesses if excess.key[0] <= step]
        if not loss_share <= reference.allowed_loss:
            sentence = f"loss {loss:.9g} instead of {plain.losses[step - 1]:.9g}"
            return _differs(of_step, step, sentence, shares)
        if not norm_share <= reference.allowed_norm and not of_step:
            sentence = (
                f"gradient norm {norm:.9g} instead of {plain.norms[step - 1]:.9g}"
            )
            return _differs(of_step, step, sentence, shares)
        if of_step:
            return _differs(of_step, step, "", shares)
    if excesses:
        return _differs(excesses, excesses[0].key[0], "", shares)
    return Verdict(Outcome.equal if bits else Outcome.within, shares=shares)


def recorded_kinds(figures: Figures) -> set[tuple[int, str]]:
    """Steps and kinds of tensors that the ranks had: updates in the backward leave no gradients,
    deferred ones no parameters between steps."""
    return {
        (step, label.rpartition(" ")[0])
        for (step, label), sums in figures.sums.items()
        if sums.elements
    }


def _differs(
    excesses: list[Excess], step: int, sentence: str, shares: dict[str, float]
) -> Verdict:
    """Name the first tensor: of one step's gradients that which differs most, since the backward
    spreads an error to all earlier layers."""
    if not excesses:
        return Verdict(Outcome.differs, f"{sentence} at step {step}", shares, step)
    first_step = min(excess.key[0] for excess in excesses)
    of_step = [excess for excess in excesses if excess.key[0] == first_step]
    grads = [excess for excess in of_step if excess.key[1].startswith("gradient of ")]
    buffers = [excess for excess in of_step if excess.key[1].startswith("buffer ")]
    candidates = (buffers if first_step == 0 else grads) or of_step
    first = max(candidates, key=lambda excess: excess.ratio)
    if first_step == 0:
        first = candidates[0]
    label = first.key[1]
    text = f"{label} at step {first_step} {first.sentence}"
    text += f" ({len(of_step)} tensors differ there)" * (len(of_step) > 1)
    if sentence:
        text += f"; {sentence} at step {step}"
    return Verdict(Outcome.differs, text, shares, first_step, label)


def _difference(key: Key, sums: Sums, reference: Reference) -> tuple[float, str]:
    """Relative difference of a tensor, and a sentence on it."""
    expected = reference.trajectory.tensors[key]
    if sums.elements < expected.size:
        missing = math.inf if expected.any() else 0.0
        return missing, "is missing"
    if not sums.unequal:
        return 0.0, ""
    size = reference.sizes[key]
    copies = sums.elements / expected.size
    share = math.sqrt(sums.differences / copies) / max(size, 1e-30)
    share = math.inf if math.isnan(share) else share
    norm = float(np.linalg.norm(expected.astype(np.float64)))
    times = math.sqrt(sums.squares / copies) / max(norm, 1e-30)
    text = f"has {times:.6g} times the norm of the plain loop's and differs by {share:.1e} of it"
    allowed = reference.allowed(key)
    return share, f"{text}, where rounding explains {allowed:.1e}" if allowed else text


def _relative(value: float, expected: float) -> float:
    difference = abs(value - expected) / max(abs(expected), 1e-30)
    return math.inf if math.isnan(difference) else difference
