"""Today's trainer on the sixteen rows of this project's first published table, for
``validate_plan``.

The rows are those of ``configs/sweep/classic_fsdp1.yaml`` and ``classic_fsdp2.yaml``, as ``fsdptoys
sweep`` runs them, predicted for eight Ascend A2 NPUs. Their memory must be at most the published
one; nothing is fitted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdptoys.config.compose import compose_config
from fsdptoys.device import GIB
from fsdptoys.device.profile import load_hardware
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.sweep.definition import read_definition
from fsdptoys.utils.tables import markdown_table
from scripts.planner.published_programs import ROWS, Published

RANKS = 8
PREFIX = "trainer"
NAMES = {f"{PREFIX} {strategy} {name}": (strategy, name) for strategy, name in ROWS}
"""Row → key of the published row with the same switches."""
ROUNDING_GIB = 0.005
"""Published values have two digits after the point."""


def row_overrides(row: str) -> list[str]:
    """Overrides of a row, each key once."""
    strategy, name = NAMES[row]
    definition = read_definition(f"classic_{strategy}")
    names = [title for owner, title in ROWS if owner == strategy]
    overrides = dict(zip(names, definition.rows, strict=True))[name]
    return list(
        {
            override.partition("=")[0]: override
            for override in (*definition.base, *overrides)
        }.values()
    )


@dataclass(frozen=True)
class TrainerRow:
    """Today's memory and time of a row with the published ones."""

    row: str
    published: Published
    prediction: Prediction

    @property
    def bounds_met(self) -> tuple[bool, bool]:
        """Whether the end of a step and the reserved memory are at most the published ones."""
        memory = self.prediction.memory
        return (
            memory.end_bytes / GIB <= self.published.end_gib + ROUNDING_GIB,
            memory.reserved_bytes / GIB <= self.published.reserved_gib + ROUNDING_GIB,
        )

    def cells(self) -> list[str]:
        """Cells of the table."""
        end, reserved = ("pass" if is_met else "**fail**" for is_met in self.bounds_met)
        published = self.published
        memory = self.prediction.memory
        seconds = self.prediction.time.step_seconds
        return [
            self.row.removeprefix(f"{PREFIX} "),
            f"{published.end_gib:.2f}",
            f"{memory.end_bytes / GIB:.2f}",
            end,
            f"{published.reserved_gib:.2f}",
            f"{memory.reserved_bytes / GIB:.2f}",
            reserved,
            f"{published.seconds:.2f}",
            f"{seconds:.2f}",
            f"{published.seconds / seconds:.2f}",
        ]


def predict_trainer_row(row: str) -> TrainerRow:
    """Predict a row."""
    hardware = load_hardware("a2")
    config = compose_config(row_overrides(row))
    config.validate(RANKS, hardware.device_type)
    return TrainerRow(row, ROWS[NAMES[row]][1], fast_estimate(config, hardware, RANKS))


HEADER = [
    "row",
    "end of step: published",
    "today",
    "",
    "reserved: published",
    "today",
    "",
]
HEADER += ["step: published", "predicted", "published / predicted"]


def trainer_table(rows: Sequence[TrainerRow]) -> str:
    """The table of memory and time."""
    return markdown_table(
        [HEADER, *map(TrainerRow.cells, rows)], right=(1, 2, 4, 5, 7, 8, 9)
    )


def failures(rows: Sequence[TrainerRow]) -> int:
    """Number of cells above the published value."""
    return sum(not is_met for row in rows for is_met in row.bounds_met)
