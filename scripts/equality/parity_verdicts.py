"""Verdicts on rows of ``scripts/parity.py``: which promise a row keeps or breaks."""

import math
from dataclasses import dataclass

from scripts.equality.parity_rows import (
    FSDP2_ON_THE_SAME_MESH,
    NATIVE,
    REDUCES_OFTENER,
    SHARDS_OTHERWISE,
)
from tests.harness.outcomes import Outcome

LOSS_TOLERANCE = 1e-6
"""Relative, in float32 and default mode."""
BF16_LOSS_TOLERANCE = 1e-4
"""Relative, with bf16 parameters in default mode."""


def max_loss_difference(outcome: Outcome, reference: Outcome) -> float:
    """Largest relative difference of a step's loss."""
    differences = [
        abs(a - b) / abs(b)
        for a, b in zip(outcome.losses, reference.losses, strict=True)
    ]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def max_norm_difference(outcome: Outcome, reference: Outcome) -> float:
    """Largest absolute difference of a step's gradient norm."""
    return max(
        abs(a - b)
        for a, b in zip(outcome.grad_norms, reference.grad_norms, strict=True)
    )


@dataclass
class Verdict:
    """A row's text, and its breach of a promise."""

    text: str
    breach: str | None = None


def judge(
    name: str,
    outcomes: dict[str, Outcome],
    reference: Outcome,
    world_size: int,
    dtype: str,
    mode: str,
    grad_accum: int = 2,
) -> Verdict:
    """Compare one row with one process and, in default mode, FSDP1 with FSDP2 and a toy with
    PyTorch's."""
    outcome = outcomes[name]
    where = f"{dtype} {mode} mode, {world_size} ranks"
    portable = mode == "portable"
    native = None if portable and name in SHARDS_OTHERWISE else NATIVE.get(name)
    if native in outcomes and outcome != outcomes[native]:
        return Verdict("BREACH", f"{where}: {name} differs from {native}")
    if outcome == reference:
        return Verdict("every bit")
    tolerance = LOSS_TOLERANCE if dtype == "float32" else BF16_LOSS_TOLERANCE
    # Nan is a breach too
    if (
        mode == "deterministic"
        or not max_loss_difference(outcome, reference) <= tolerance
    ):
        return Verdict("BREACH", f"{where}: {name} differs from one process")
    within = f"loss within {tolerance:g}"
    twin = (FSDP2_ON_THE_SAME_MESH | NATIVE | REDUCES_OFTENER).get(name)
    if twin is None or twin not in outcomes:
        return Verdict(within)
    if outcome == outcomes[twin]:
        return Verdict(f"{within}, = {twin}")
    adds_alike = grad_accum == 1 and not portable
    if name in FSDP2_ON_THE_SAME_MESH:
        if dtype == "bfloat16":
            return Verdict(f"{within}, {twin} adds in float32")
        adds_alike = not portable
    if adds_alike and (
        world_size == 2 or (world_size == 4 and name.startswith("hsdp"))
    ):
        return Verdict(
            "BREACH",
            f"{where}: {name} differs from {twin} although each reduction adds two numbers",
        )
    return Verdict(f"{within}, last bits != {twin}")
