"""Today's trainer on one H200 as the planner predicts it, for ``validate_plan``: no figure of these
rows is measured.

The shapes are those of ``bench_gpu``, with every default of the trainer. The last row is a model
without settings, as ``fsdptoys train`` runs it. A profile's ``memory_efficiency`` and host times
are assumptions, named on the page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fsdptoys.cli.plan import compose_hypothetical
from fsdptoys.device import GIB
from fsdptoys.device.profile import Quantity, load_hardware
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.plan.search.switches import validate_switches
from fsdptoys.plan.simulator.events import KernelKind
from fsdptoys.utils.tables import markdown_table

HARDWARE = "h200"
PREFIX = "h200"
_SHAPE = ("experiment=null", "parallel.param_dtype=bfloat16", "memory.chunk_loss=true")
_LARGE = (
    *_SHAPE,
    "optim.state_dtype=bfloat16",
    "memory.gradient_checkpointing=selective",
)
_ROWS: dict[str, tuple[str, ...]] = {
    "1B 4x4096": (
        *_SHAPE,
        "model=llama3_1b",
        "train.batch_size=4",
        "train.seq_len=4096",
    ),
    "1B 2x8192": (
        *_SHAPE,
        "model=llama3_1b",
        "train.batch_size=2",
        "train.seq_len=8192",
    ),
    "7B 2x4096": (
        *_LARGE,
        "model=llama2_7b",
        "train.batch_size=2",
        "train.seq_len=4096",
    ),
    "8B 1x8192": (
        *_LARGE,
        "model=llama3_8b",
        "train.batch_size=1",
        "train.seq_len=8192",
    ),
    "8B 2x4096": (
        *_LARGE,
        "model=llama3_8b",
        "train.batch_size=2",
        "train.seq_len=4096",
    ),
    "1B without settings": ("model=llama3_1b",),
}
NAMES = {f"{PREFIX} {row}": overrides for row, overrides in _ROWS.items()}
"""Row → overrides."""
KINDS = [
    kind.value for kind in (KernelKind.matmul, KernelKind.attention, KernelKind.memory)
]
HEADER = ["row", "step, ms", "tokens/s", "MFU", "peak, GiB", "reserved, GiB"]
HEADER += ["matmul, ms", "attention", "element-wise", "collectives, copies", "host"]


@dataclass(frozen=True)
class PlannedRow:
    """Predicted memory and time of a row on one device."""

    row: str
    prediction: Prediction

    def cells(self) -> list[str]:
        """Cells of the table."""
        memory = self.prediction.memory
        time = self.prediction.time
        milliseconds = [time.kinds[kind] for kind in KINDS]
        milliseconds += [
            time.exposed_communication_seconds + time.exposed_transfer_seconds,
            time.host_seconds,
        ]
        return [
            self.row.removeprefix(f"{PREFIX} "),
            f"{1e3 * time.step_seconds:.1f}",
            f"{self.prediction.tokens_per_second:,.0f}",
            f"{self.prediction.mfu:.1%}",
            f"{memory.peak_bytes / GIB:.1f}",
            f"{memory.reserved_bytes / GIB:.1f}",
            *(f"{1e3 * seconds:.1f}" for seconds in milliseconds),
        ]


def predict_planned_row(row: str) -> PlannedRow:
    """Predict a row."""
    overrides = [*NAMES[row], f"plan.hardware={HARDWARE}", "plan.world_size=1"]
    run = compose_hypothetical(overrides, searches=False)
    validate_switches(run.config, 1, run.hardware.device_type, 1)
    return PlannedRow(row, fast_estimate(run.config, run.hardware, 1))


def planned_table(rows: Sequence[PlannedRow]) -> str:
    """The table, and the profile's rates that are assumed."""
    hardware = load_hardware(HARDWARE)
    assumed = [
        name
        for name, value in vars(hardware).items()
        if isinstance(value, Quantity) and "assumed" in value.source
    ]
    table = markdown_table([HEADER, *map(PlannedRow.cells, rows)], right=range(1, 11))
    return f"{table}\n\nAssumed in the profile: {', '.join(assumed)}."
