"""Compare the planner's simulator with published measurements; exit with 1 if an error exceeds its
bar.

    python scripts/planner/validate_plan.py
    python scripts/planner/validate_plan.py --rows "fsdp2 block gc" "torchtitan 8"
    python scripts/planner/validate_plan.py --rows h200
    python scripts/planner/validate_plan.py --write benchmarks/plan.md --jobs 2
    python scripts/planner/validate_plan.py --errors 60 --searches 100 --jobs 2

Today's trainer is predicted. It did not make the published runs: sections 2 to 4 trace programs at
full depth that do the same as the published ones (``published_programs``,
``published_torchtitan``), and replay them.

1. Today's trainer with the switches of the first README of this project (``trainer_rows``): memory
   allocated at the end of a step, and reserved, each at most the published value. Predicted step
   times stand next to the published ones.
2. The first README (8 Ascend A2, Llama2-7B, batch 1, sequence 4096, torch 2.7.1): memory allocated
   at the end of a step, and reserved. Nothing is fitted.
3. Its step times, with the speed of matmuls fitted on the first row of each strategy; then again
   with two more numbers that no data sheet has, the latency of a transfer and the rate of AdamW on
   a host core, fitted on the two FSDP2 rows that depend on them.
4. torchtitan's Llama 3.1 8B on 8 and 128 H100s of December 2024: memory; and the time on 128, with
   the speed of matmuls fitted on 8.

5. Today's trainer on one H200 (``planned_rows``): predicted step, speed and memory, without a
   published counterpart.

``--layouts`` prints section 7 instead: today's trainer with the layouts of published runs
(``planned_layouts``).

``--errors`` and ``--searches`` print the errors of the estimates instead, and searches checked by
brute force (``estimate_errors``).

Reserved memory settles after three steps, so three are traced; the numbers are of the last one.
A prediction has two.
"""

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from multiprocessing.pool import ThreadPool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from fsdptoys.plan.simulator.events import Trace
from fsdptoys.plan.trace.op_costs import matmul_workspace_bytes
from fsdptoys.plan.trace.op_recorder import OpRecorder
from fsdptoys.plan.trace.tracer import tracing_environment
from fsdptoys.utils.tables import markdown_table
from scripts.common.progress import progress, unit
from scripts.planner import (
    estimate_errors,
    planned_layouts,
    planned_rows,
    published_torchtitan,
    trainer_rows,
)
from scripts.planner.planned_rows import PlannedRow, planned_table, predict_planned_row
from scripts.planner.published_findings import (
    TORCHTITAN,
    Finding,
    Rows,
    a2,
    classic_memory,
    classic_time,
    torchtitan,
)
from scripts.planner.published_layouts import read_layouts
from scripts.planner.published_llama2 import Sizes
from scripts.planner.published_programs import ROWS, first_program
from scripts.planner.published_torchtitan import h100
from scripts.planner.trainer_rows import (
    TrainerRow,
    failures,
    predict_trainer_row,
    trainer_table,
)
from tests.harness.full_trace import trace_here
from tests.harness.plan_processes import in_fresh_process

STEPS = 3
HEADER = ["row", "", "published", "predicted", "error", "bar", ""]
PUBLISHED = [
    *(" ".join(key) for key in ROWS),
    *(f"torchtitan {ranks}" for ranks in TORCHTITAN),
]
NAMES = [*trainer_rows.NAMES, *PUBLISHED, *planned_rows.NAMES]


def trace_row(name: str, n_layers: int | None = None) -> Trace:
    """Trace a row in this process, which cannot be used afterwards.

    Args:
        name: one of ``PUBLISHED``.
        n_layers: of the model; None for all.
    """
    family, _, rest = name.partition(" ")
    depth = {} if n_layers is None else {"n_layers": n_layers}
    is_titan = family == "torchtitan"
    hardware = h100() if is_titan else a2()

    def program(recorder: OpRecorder) -> None:
        device = torch.device(recorder.device_type, 0)
        if is_titan:
            sizes = published_torchtitan.Sizes(**depth)
            published_torchtitan.torchtitan_program(recorder, device, sizes, STEPS)
        else:
            first_program(
                ROWS[family, rest][0], recorder, device, Sizes(**depth), STEPS
            )

    return trace_here(
        program,
        attention=hardware.attention,
        world_size=int(rest) if is_titan else trainer_rows.RANKS,
        workspace_bytes=matmul_workspace_bytes(hardware),
    )


def make_traces(names: Sequence[str], jobs: int) -> dict[str, Trace]:
    """Trace rows, each in a process of its own."""

    def make(name: str) -> Trace:
        with unit(f"trace of {name}"):
            trace: Trace = in_fresh_process(trace_row, name)
        return trace

    with ThreadPool(jobs) as pool:
        return dict(zip(names, pool.map(make, names, chunksize=1), strict=True))


def select_rows(names: Iterable[str]) -> list[str]:
    """Rows of these names, or with one of these words first."""
    chosen = {
        name
        for name_or_strategy in names
        for name in NAMES
        if name == name_or_strategy
        or (name_or_strategy not in NAMES and name.split()[0] == name_or_strategy)
    }
    return [name for name in NAMES if name in chosen]


def render(
    today: Sequence[TrainerRow], rows: Rows, planned: Sequence[PlannedRow]
) -> tuple[str, bool]:
    """The page, and whether every bar was met."""
    sections: list[tuple[str, list[Finding], list[str]]] = [
        ("2. The first table: memory, nothing fitted", classic_memory(rows), []),
        (
            "3a. The first table: time, one row of each strategy fitted",
            *classic_time(rows, fit_host=False),
        ),
        (
            "3b. The same, with transfers and AdamW on the host from one row each",
            *classic_time(rows, fit_host=True),
        ),
        ("4. torchtitan: Llama 3.1 8B on H100s", *torchtitan(rows)),
    ]
    parts = ["# The planner against published runs", "\n".join(about())]
    if today:
        parts += ["## 1. Today's trainer with the switches of the first table"]
        parts += [trainer_table(today)]
    for title, findings, notes in sections:
        if findings:
            cells = [HEADER, *(finding.cells() for finding in findings)]
            parts += [f"## {title}", "\n".join(f"- {note}" for note in notes)]
            parts += [markdown_table(cells, right=(2, 3, 4, 5))]
    if planned:
        parts += ["## 5. Today's trainer on one H200: predicted, not measured"]
        parts += [planned_table(planned)]
    met = [finding.met for _, findings, _ in sections for finding in findings]
    parts += [f"{met.count(False)} of {len(met)} bars missed."]
    above = failures(today)
    if today:
        parts += [
            f"{above} of {2 * len(today)} cells of today's trainer are above the published value."
        ]
    return "\n\n".join(filter(None, parts)) + "\n", all(met) and not above


def check_estimate(runs: int, searches: int, jobs: int) -> int:
    """Compare estimates with full traces of the first runs, and check searches; 0 if the bars are
    met."""
    with progress(bool(runs) + searches):
        errors = estimate_errors.estimate_errors(jobs, runs) if runs else []
        lines, met = estimate_errors.render(
            errors, estimate_errors.run_searches(searches, jobs) if searches else []
        )
    print("\n".join([*about()[:2], "", *lines]))
    return 0 if met else 1


def check_layouts(names: list[str]) -> int:
    """Compare published rows of several axes with the planner; 0 if the bars are met."""
    rows = [row for row in read_layouts() if not names or row.name in names]
    with progress(len({row.trace_key for row in rows if not row.unplanned})):
        results = planned_layouts.plan_layouts(rows)
    page, met = planned_layouts.render_layouts(rows, results)
    print("\n".join([*about()[:2], "", page]))
    return 0 if met else 1


def about() -> list[str]:
    """Notes on how the page was made."""
    return [
        f"- `python {shlex.join(sys.argv)}` on {date.today()}",
        (
            f"- torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} "
            "CPU cores"
        ),
        (
            "- First table: 8 Ascend A2 NPUs, Llama2-7B, batch 1, sequence 4096, torch 2.7.1, "
            "expandable segments."
        ),
        (
            "- gc: checkpointing; chunk: chunked loss; oo, co: optimizer or all offloaded; parts: "
            "finer wrapping."
        ),
        "- torchtitan: batch 2 × 8192, selective checkpointing, December 2024, H100 with 2.4 TB/s.",
    ]


def main() -> int:
    """Trace, replay, print; 0 if every bar is met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        default=NAMES,
        metavar="ROW",
        help="names of rows, or their first word",
    )
    parser.add_argument("--write", type=Path, help="Markdown file for the page")
    parser.add_argument(
        "--jobs", type=int, default=1, help="rows to trace concurrently"
    )
    parser.add_argument(
        "--errors",
        type=int,
        metavar="N",
        help="compare estimates with N runs' full traces only",
    )
    parser.add_argument(
        "--searches",
        type=int,
        metavar="N",
        help="check N random searches by brute force only",
    )
    parser.add_argument(
        "--layouts",
        nargs="*",
        metavar="ROW",
        help="published layouts only, all or those named",
    )
    args = parser.parse_args()
    if not all(map(select_rows, ([word] for word in args.rows))):
        parser.error(f"--rows must be of: {', '.join(NAMES)}")
    os.environ.update(tracing_environment())
    if args.errors is not None or args.searches is not None:
        return check_estimate(args.errors or 0, args.searches or 0, args.jobs)
    if args.layouts is not None:
        return check_layouts(args.layouts)
    names = select_rows(args.rows)
    traced = [name for name in names if name in PUBLISHED]
    with progress(len(traced) + 1):
        rows = Rows(make_traces(traced, args.jobs))
        with unit("predictions, replays and fits"):
            today = [
                predict_trainer_row(name)
                for name in names
                if name in trainer_rows.NAMES
            ]
            planned = [
                predict_planned_row(name)
                for name in names
                if name in planned_rows.NAMES
            ]
            page, met = render(today, rows, planned)
    print(page)
    if args.write:
        args.write.write_text(page)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
