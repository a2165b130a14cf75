"""Predict memory and time of tuning a model: all parameters, adapters, adapters beside four-bit
weights.

    python scripts/planner/tuning_table.py
    python scripts/planner/tuning_table.py --models llama3_8b --write docs/tuning.png

Each is planned under DDP, FSDP2 and FSDP2 with CPU offload, on 1 to 8 devices of 24, 48 and 80 GiB,
with the planner's planner: bfloat16, full checkpointing, chunked loss, one sequence a device.
Nothing is trained.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fsdptoys.config.compose import compose_config
from fsdptoys.device.profile import Hardware, load_hardware
from fsdptoys.errors import ConfigError
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.plan.estimate.estimate import fast_estimate

GIB = 2**30
DEVICES = {"4090": 24, "l40s": 48, "h100": 80}
"""Hardware profile → its memory in GiB, as sold."""
RANKS = (1, 2, 4, 8)
TUNES = {
    "full": ("tune=full",),
    "LoRA": ("tune=lora", "tune.rank=16"),
    "QLoRA": ("tune=lora", "tune.rank=16", "tune.base=nf4"),
}
STRATEGIES = {
    "DDP": ("parallel=ddp",),
    "FSDP2": ("parallel=fsdp2",),
    "FSDP2, offload": ("parallel=fsdp2", "memory.cpu_offload=true"),
}
COMMON = (
    *("experiment=null", "parallel.param_dtype=bfloat16", "train.batch_size=1"),
    *("memory.gradient_checkpointing=full", "memory.chunk_loss=true"),
)
COLORS = {"fits": "#2a9d8f", "host": "#e9c46a", "no": "#d9d9d9", "refused": "#ffffff"}


@dataclass(frozen=True)
class Cell:
    """One combination on one kind of device."""

    prediction: Prediction | None  # None if the configuration is refused
    fits: bool = False
    fits_host: bool = True

    @property
    def state(self) -> str:
        """Key of ``COLORS``."""
        if self.prediction is None:
            return "refused"
        if not self.fits:
            return "no"
        return "fits" if self.fits_host else "host"


def plan(overrides: Sequence[str], hardware: Hardware, ranks: int) -> Cell:
    """Predict a combination; a refused one has no prediction."""
    try:
        config = compose_config(
            [
                *overrides,
                *(
                    ["parallel=single"]
                    if ranks == 1 and "parallel=ddp" in overrides
                    else []
                ),
            ]
        )
        config.validate(
            ranks,
            hardware.device_type,
            min(ranks, int(hardware.devices_per_node.value)),
        )
        prediction = fast_estimate(config, hardware, ranks)
    except ConfigError:
        return Cell(None)
    memory = prediction.memory
    return Cell(
        prediction,
        memory.reserved_bytes <= hardware.usable_bytes,
        memory.host_bytes <= hardware.host_memory_bytes.value,
    )


def text_of(cell: Cell) -> str:
    """Seconds of a step, or why there is none."""
    if cell.prediction is None:
        return "refused"
    if not cell.fits:
        return "—"
    return (
        f"{cell.prediction.time.step_seconds:.2f} s"
        if cell.fits_host
        else "host memory"
    )


def main() -> int:
    """Print a table for each model, and draw a picture of all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["llama3_8b", "llama3_70b"])
    parser.add_argument(
        "--seq-len", type=int, default=2048, help="tokens of a sequence; default: 2048"
    )
    parser.add_argument(
        "--write", type=Path, help="also draw the tables into a PNG file"
    )
    arguments = parser.parse_args()
    started = time.perf_counter()
    profiles = {name: load_hardware(name) for name in DEVICES}
    tables: dict[str, dict[tuple[str, str, int], dict[str, Cell]]] = {}
    for model in arguments.models:
        table = tables[model] = {}
        for tune, tune_overrides in TUNES.items():
            for strategy, strategy_overrides in STRATEGIES.items():
                for ranks in RANKS:
                    overrides = [
                        *COMMON,
                        f"model={model}",
                        f"train.seq_len={arguments.seq_len}",
                    ]
                    overrides += [*tune_overrides, *strategy_overrides]
                    table[tune, strategy, ranks] = {
                        name: plan(overrides, hardware, ranks)
                        for name, hardware in profiles.items()
                    }
        print_table(model, table)
    count = sum(map(len, tables.values())) * len(DEVICES)
    print(f"\n{count} predictions in {time.perf_counter() - started:.0f} s")
    if arguments.write:
        draw(tables, arguments.write)
    return 0


def print_table(model: str, table: dict[tuple[str, str, int], dict[str, Cell]]) -> None:
    """Print one model's rows as Markdown."""
    names = [f"{load_hardware(name).title.removeprefix('NVIDIA ')}" for name in DEVICES]
    print(
        f"\n{model}: reserved memory of a device, its host memory, and the step on each kind of "
        "device\n"
    )
    print(
        f"| tune | strategy | devices | device GiB | host GiB | {' | '.join(names)} |"
    )
    print(f"|---|---|---:|---:|---:|{'---:|' * len(names)}")
    for (tune, strategy, ranks), cells in table.items():
        memories = [
            cell.prediction.memory
            for cell in cells.values()
            if cell.prediction is not None
        ]
        reserved = "refused"
        if memories:
            sizes = sorted(
                {f"{memory.reserved_bytes / GIB:.1f}" for memory in memories}, key=float
            )
            reserved = "–".join(dict.fromkeys([sizes[0], sizes[-1]]))
        host = (
            f"{max(memory.host_bytes for memory in memories) / GIB:.1f}"
            if memories
            else ""
        )
        steps = " | ".join(text_of(cell) if memories else "" for cell in cells.values())
        print(f"| {tune} | {strategy} | {ranks} | {reserved} | {host} | {steps} |")


def draw(
    tables: dict[str, dict[tuple[str, str, int], dict[str, Cell]]], path: Path
) -> None:
    """Draw which combinations fit, and the memory of a device."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = list(itertools.product(TUNES, STRATEGIES))
    columns = list(itertools.product(DEVICES, RANKS))
    states = list(COLORS)
    figure = Figure(figsize=(12, 0.6 + 3.9 * len(tables)), layout="constrained")
    panels = figure.subplots(len(tables), squeeze=False).flat
    for axes, (model, table) in zip(panels, tables.items(), strict=True):
        cells = [
            [table[(*row, ranks)][name] for name, ranks in columns] for row in rows
        ]
        colors = [[states.index(cell.state) for cell in line] for line in cells]
        axes.pcolormesh(
            colors,
            cmap=ListedColormap(list(COLORS.values())),
            vmin=0,
            vmax=3,
            edgecolor="white",
            linewidth=2,
        )
        for y, x in itertools.product(range(len(rows)), range(len(columns))):
            cell = cells[y][x]
            if cell.prediction is not None:
                label = f"{cell.prediction.memory.reserved_bytes / GIB:.0f} GiB"
                if cell.state == "fits":
                    label += f"\n{cell.prediction.time.step_seconds:.2g} s"
                color = "white" if cell.state == "fits" else "#555555"
                axes.text(
                    x + 0.5,
                    y + 0.5,
                    label,
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color=color,
                )
        axes.invert_yaxis()
        axes.set_xticks(
            [x + 0.5 for x in range(len(columns))],
            [f"{ranks}\n{name}" for name, ranks in columns],
        )
        axes.set_yticks(
            [y + 0.5 for y in range(len(rows))], [", ".join(row) for row in rows]
        )
        axes.tick_params(length=0)
        axes.set_title(model, loc="left", fontweight="bold")
    meanings = {"fits": "fits", "host": "too little host memory", "no": "does not fit"}
    handles = [
        Patch(facecolor=COLORS[state], edgecolor="#999999", label=text)
        for state, text in meanings.items()
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False
    )
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
