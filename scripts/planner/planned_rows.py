"""Today's trainer on one H200 as the planner predicts it, for ``validate_plan``: no figure of these
rows is measured.

The shapes are those of ``bench_gpu``, with every default of the trainer. The last row is a model
without settings, as ``fsdptoys train`` runs it. A profile's ``memory_efficiency`` and host times
are assumptions, named on the page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fsdptoys.cli.plan import compose_hypothetical
from fsdptoys.config.schema import Config
from fsdptoys.device import GIB
from fsdptoys.device.profile import Hardware, Quantity, load_hardware
from fsdptoys.plan.search.switches import validate_switches
from fsdptoys.plan.simulator.events import KernelKind
from fsdptoys.plan.simulator.replay import Replay
from fsdptoys.plan.trace.tracer import Program, trainer_program
from fsdptoys.utils.tables import markdown_table

HARDWARE = "h200"
PREFIX = "h200"
_SHAPE = ("experiment=null", "parallel.param_dtype=bfloat16", "memory.chunk_loss=true")
_LARGE = (*_SHAPE, "optim.state_dtype=bfloat16", "memory.gradient_checkpointing=selective")
_ROWS: dict[str, tuple[str, ...]] = {
    "1B 4x4096": (*_SHAPE, "model=llama3_1b", "train.batch_size=4", "train.seq_len=4096"),
    "1B 2x8192": (*_SHAPE, "model=llama3_1b", "train.batch_size=2", "train.seq_len=8192"),
    "7B 2x4096": (*_LARGE, "model=llama2_7b", "train.batch_size=2", "train.seq_len=4096"),
    "8B 1x8192": (*_LARGE, "model=llama3_8b", "train.batch_size=1", "train.seq_len=8192"),
    "8B 2x4096": (*_LARGE, "model=llama3_8b", "train.batch_size=2", "train.seq_len=4096"),
    "1B without settings": ("model=llama3_1b",),
}
NAMES = {f"{PREFIX} {row}": words for row, words in _ROWS.items()}
"""Row → overrides."""
KINDS = [kind.value for kind in (KernelKind.matmul, KernelKind.attention, KernelKind.memory)]
HEADER = ["row", "step, ms", "tokens/s", "MFU", "peak, GiB", "reserved, GiB"]
HEADER += ["matmul, ms", "attention", "element-wise", "collectives, copies", "host"]


def planned_config(row: str, n_layers: int | None = None) -> Config:
    """The validated configuration of a row."""
    depth = [] if n_layers is None else [f"model.n_layers={n_layers}"]
    run = compose_hypothetical(
        [*NAMES[row], *depth, f"plan.hardware={HARDWARE}", "plan.world_size=1"], searches=False
    )
    validate_switches(run.config, run.world_size, run.hardware.device_type, 1)
    return run.config


def planned_row(row: str, steps: int, n_layers: int | None) -> Program:
    """The trainer's steps of a row as a program to trace."""
    return trainer_program(planned_config(row, n_layers), load_hardware(HARDWARE), steps)


@dataclass(frozen=True)
class PlannedRow:
    """Predicted memory and time of a row on one device."""

    row: str
    config: Config
    replay: Replay

    def cells(self, hardware: Hardware) -> list[str]:
        """Cells of the table."""
        config, memory, time = self.config, self.replay.memory(), self.replay.time()
        tokens = config.train.batch_size * config.train.seq_len * config.train.grad_accum
        with torch.device("meta"):
            flops = tokens * config.model.build().flops_per_token(config.train.seq_len)
        mfu = flops / time.step_seconds / hardware.peak_flops["bfloat16"].value
        milliseconds = [time.kinds[kind] for kind in KINDS]
        milliseconds += [
            time.exposed_communication_seconds + time.exposed_transfer_seconds,
            time.host_seconds,
        ]
        return [
            self.row.removeprefix(f"{PREFIX} "),
            f"{1e3 * time.step_seconds:.1f}",
            f"{tokens / time.step_seconds:,.0f}",
            f"{mfu:.1%}",
            f"{memory.peak_bytes / GIB:.1f}",
            f"{memory.reserved_bytes / GIB:.1f}",
            *(f"{1e3 * seconds:.1f}" for seconds in milliseconds),
        ]


def planned_table(rows: Sequence[PlannedRow]) -> str:
    """The table, and the profile's rates that are assumed."""
    hardware = load_hardware(HARDWARE)
    assumed = [
        name
        for name, value in vars(hardware).items()
        if isinstance(value, Quantity) and "assumed" in value.source
    ]
    table = markdown_table([HEADER, *(row.cells(hardware) for row in rows)], right=range(1, 11))
    return f"{table}\n\nAssumed in the profile: {', '.join(assumed)}."
