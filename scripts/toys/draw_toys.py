"""Draw recorded steps of the toys on two ranks: computation, collectives and memory.

    python scripts/toys/draw_toys.py                      # writes docs/toys/*.png
    python scripts/toys/draw_toys.py --write /tmp --bucket-mb 2

Pictures: ``timeline-ddp``, ``timeline-zero``, ``timeline-fsdp``: computation and collectives of
both ranks; ``memory``: live bytes of both ranks through a step, one panel a strategy;
``timeline-context``, ``timeline-experts``: one layer. ``record_toys`` and ``record_layers``
describe the measurement. On a CPU, computation and communication share the cores: the pictures show
order and overlap, not the gain on a GPU.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from scripts.common.machine import machine
from scripts.common.progress import progress, unit
from scripts.toys.record_layers import ATTENTIONS, ROUTINGS, record_layers
from scripts.toys.record_toys import Bar, Recorded, record
from tests.harness.ranks import run_ranks

STRATEGIES = ["toy_ddp", "toy_zero1", "toy_zero2", "toy_zero3", "toy_fsdp"]
TIMELINES = {
    "timeline-ddp": ["toy_ddp"],
    "timeline-zero": ["toy_zero1", "toy_zero2", "toy_zero3"],
    "timeline-fsdp": ["toy_fsdp"],
}
LAYERS = {"timeline-context": ATTENTIONS, "timeline-experts": ROUTINGS}
RANKS = 2
COLORS = {
    "forward": "#7fb3d5",
    "backward": "#2874a6",
    "update": "#1b2631",
    "all_gather": "#f5b041",
    "reduce_scatter": "#cb4335",
    "all_reduce": "#8e44ad",
    "broadcast": "#f4d03f",
    "reduce": "#e67e22",
    "all_to_all": "#27ae60",
    "receive": "#76d7c4",
}
DARK = ("backward", "update", "all_reduce", "reduce_scatter", "all_to_all")
"""Kinds with white labels."""
MIB = 2**20
WIDTH_INCHES = 10.5
LETTER_INCHES = 0.06
"""Of a panel, and of a letter in a bar."""
LANE = 0.42
"""Height of a lane of collectives, where that of computing is 1."""
PHASES = (("forward", 0.0, 1.0), ("backward", 1.0, 3.0), ("update", 3.0, 3.7))
"""Position of each phase in the pictures of memory."""
KEPT = {
    "toy_ddp": lambda ranks: 16,
    "toy_zero1": lambda ranks: 8 + 8 / ranks,
    "toy_zero2": lambda ranks: 4 + 12 / ranks,
    "toy_zero3": lambda ranks: 16 / ranks,
    "toy_fsdp": lambda ranks: 16 / ranks,
}
"""Bytes of parameters, gradients and AdamW's states for each parameter."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", type=Path, default=Path("docs/toys"), help="folder of the pictures"
    )
    parser.add_argument(
        "--only", choices=("strategies", "layers"), help="without the other pictures"
    )
    parser.add_argument(
        "--bucket-mb",
        type=int,
        default=4,
        help="MiB of the buckets of DDP, ZeRO-1 and ZeRO-2",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Record and draw."""
    arguments = parse_arguments(argv)
    strategies = [] if arguments.only == "layers" else STRATEGIES
    layers = {} if arguments.only == "strategies" else LAYERS
    pictures: dict[str, Figure] = {}
    # ``record`` has two for each
    with progress(2 * len(strategies) + sum(map(len, layers.values())) + 1):
        if strategies:
            per_rank = run_ranks(
                RANKS,
                record,
                [[f"parallel={name}"] for name in strategies],
                arguments.bucket_mb,
            )
            steps = {
                name: [recorded[index] for recorded in per_rank]
                for index, name in enumerate(strategies)
            }
            for name, drawn in TIMELINES.items():
                pictures[name] = draw_timelines(
                    {f"parallel={strategy}": steps[strategy] for strategy in drawn}
                )
            pictures["memory"] = draw_memory(steps)
        if layers:
            of_ranks = run_ranks(RANKS, record_layers)
            for name, cases in layers.items():
                pictures[name] = draw_timelines(
                    {
                        case.replace("_", " "): [of[case] for of in of_ranks]
                        for case in cases
                    }
                )
        with unit("pictures"):
            arguments.write.mkdir(parents=True, exist_ok=True)
            for name, figure in pictures.items():
                figure.savefig(arguments.write / f"{name}.png", dpi=110)
    print(f"{', '.join(pictures)} in {arguments.write}; {machine('cpu')}")
    return 0


def draw_timelines(steps: dict[str, list[Recorded]]) -> Figure:
    """Draw one panel a strategy: the computation of each rank, and its collectives below.

    Args:
        steps: title → recording of each rank.
    """
    heights = [
        sum(1 + LANE * max(1, _lanes(rank.collectives)[1]) + 0.5 for rank in ranks)
        for ranks in steps.values()
    ]
    figure = Figure(
        figsize=(12, 0.95 + sum(0.5 * height + 0.65 for height in heights)),
        layout="constrained",
    )
    panels: Any = figure.subplots(
        len(steps), 1, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    kinds: dict[str, None] = {}
    for axes, (name, ranks) in zip(panels[:, 0], steps.items(), strict=True):
        axes.set_xlim(0, 1e3 * max(rank.seconds for rank in ranks))
        top = 0.0
        ticks = []
        labels = []
        for number, rank in enumerate(ranks):
            for bar in rank.computing:
                _draw(axes, bar, top, 0.9)
            ticks.append(top + 0.45)
            labels.append(f"rank {number} computes")
            lanes, count = _lanes(rank.collectives)
            for bar, lane in zip(rank.collectives, lanes, strict=True):
                _draw(axes, bar, top + 1 + lane * LANE, LANE * 0.88)
            ticks.append(top + 1 + LANE * max(1, count) / 2)
            labels.append("exchanges")
            kinds |= dict.fromkeys(
                bar.kind for bar in [*rank.computing, *rank.collectives]
            )
            top += 1 + LANE * max(1, count) + 0.5
        axes.set_ylim(top - 0.4, -0.1)
        axes.set_yticks(ticks, labels)
        axes.tick_params(axis="y", length=0)
        axes.set_title(name, loc="left", fontsize=11, fontweight="bold")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    panels[-1, 0].set_xlabel("milliseconds since the step began")
    handles = [
        Patch(color=color, label=kind.replace("_", "-"))
        for kind, color in COLORS.items()
        if kind in kinds
    ]
    figure.legend(
        handles=handles, loc="outside upper center", ncols=len(handles), frameon=False
    )
    return figure


def draw_memory(steps: dict[str, list[Recorded]]) -> Figure:
    """Draw live bytes of each rank through a step, strategies side by side on one scale.

    Args:
        steps: strategy → recording of each rank.
    """
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    panels: Any = figure.subplots(1, len(steps), sharey=True)
    for axes, (name, ranks) in zip(panels, steps.items(), strict=True):
        for phase, begin, end in PHASES:
            axes.axvspan(begin, end, color=COLORS[phase], alpha=0.18, lw=0)
            axes.text((begin + end) / 2, 1.01, phase, ha="center", va="bottom", fontsize=8,
                      transform=axes.get_xaxis_transform())  # fmt: skip
        for number, (rank, color) in enumerate(
            zip(ranks, ("#1b2631", "#cb4335"), strict=True)
        ):
            moments = [_position(rank, moment) for moment, _ in rank.memory]
            sizes = [size / MIB for _, size in rank.memory]
            axes.step(
                moments,
                sizes,
                where="post",
                color=color,
                lw=1.1,
                label=f"rank {number}",
                alpha=0.85,
            )
        peak = max(size for rank in ranks for _, size in rank.memory) / MIB
        formula_mib = KEPT[name](len(ranks)) * ranks[0].parameters / MIB
        axes.axhline(
            formula_mib, color="#555555", ls=(0, (4, 3)), lw=0.9, label="formula"
        )
        axes.set_title(
            f"{name}\nformula {formula_mib:.1f}, peak {peak:.1f} MiB",
            fontsize=10,
            pad=18,
        )
        axes.set_xlim(0, PHASES[-1][2])
        axes.set_xticks([])
        axes.set_xlabel("one step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("live tensors of a rank, MiB")
    panels[-1].legend(frameon=False, loc="upper right")
    return figure


def _position(rank: Recorded, moment: float) -> float:
    """Return the position of a moment in the panel; phases have the same width in all panels."""
    begins = [
        0.0,
        rank.phases["backward"],
        rank.phases["optimizer"],
        rank.memory_seconds,
    ]
    number = max(index for index in range(len(PHASES)) if moment >= begins[index])
    _, begin, end = PHASES[number]
    return begin + (end - begin) * (moment - begins[number]) / (
        begins[number + 1] - begins[number]
    )


def _draw(axes: Any, bar: Bar, top: float, height: float) -> None:
    """Draw a bar, with its label if there is room."""
    begin = 1e3 * bar.begin
    width = 1e3 * (bar.end - bar.begin)
    axes.broken_barh(
        [(begin, width)],
        (top, height),
        color=COLORS[bar.kind],
        edgecolor="white",
        linewidth=0.5,
    )
    if WIDTH_INCHES * width / axes.get_xlim()[1] > LETTER_INCHES * (len(bar.label) + 1):
        color = "white" if bar.kind in DARK else "black"
        axes.text(
            begin + width / 2, top + height / 2, bar.label,
            ha="center", va="center", fontsize=7, color=color,
        )  # fmt: skip


def _lanes(bars: list[Bar]) -> tuple[list[int], int]:
    """Return the first free lane for each bar, and the number of lanes."""
    ends: list[float] = []
    lanes = []
    for bar in bars:
        lane = next(
            (number for number, end in enumerate(ends) if end <= bar.begin), len(ends)
        )
        ends[lane : lane + 1] = [bar.end]
        lanes.append(lane)
    return lanes, len(ends)


if __name__ == "__main__":
    raise SystemExit(main())
