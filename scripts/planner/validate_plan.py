"""Compare the planner's simulator with published measurements; exit with 1 if an error exceeds its
bar.

    python scripts/planner/validate_plan.py
    python scripts/planner/validate_plan.py --rows "fsdp2 block gc" "torchtitan 8"
    python scripts/planner/validate_plan.py --rows h200
    python scripts/planner/validate_plan.py --write benchmarks/plan.md --jobs 2
    python scripts/planner/validate_plan.py --errors 60 --searches 100 --jobs 2

Every row is traced at full depth and replayed. Today's trainer did not make the published runs:
sections 2 to 4 trace programs that do the same as the published ones (``published_programs``,
``published_torchtitan``).

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
"""

import argparse
import os
import pickle
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from datetime import date
from multiprocessing.pool import ThreadPool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from fsdptoys.device.profile import load_hardware
from fsdptoys.plan.simulator.events import Trace
from fsdptoys.plan.trace.op_costs import matmul_workspace_bytes
from fsdptoys.plan.trace.op_recorder import OpRecorder
from scripts.common.progress import progress, unit
from scripts.planner import (
    estimate_errors,
    planned_layouts,
    planned_rows,
    published_torchtitan,
    trainer_rows,
)
from scripts.planner.finding import Finding
from scripts.planner.planned_rows import planned_table
from scripts.planner.published_findings import (
    TORCHTITAN,
    Rows,
    a2,
    classic_memory,
    classic_time,
    file_name,
    rows_of_h200,
    torchtitan,
    trainers_rows,
)
from scripts.planner.published_layouts import read_layouts
from scripts.planner.published_llama2 import Sizes
from scripts.planner.published_programs import ROWS, first_program
from scripts.planner.published_torchtitan import h100
from scripts.planner.trainer_rows import failures, trainer_table
from tests.harness.full_trace import trace_here

STEPS = 3
TIMEOUT_SECONDS = 900.0


PUBLISHED = [*(" ".join(key) for key in ROWS), *(f"torchtitan {ranks}" for ranks in TORCHTITAN)]
NAMES = [*trainer_rows.NAMES, *PUBLISHED, *planned_rows.NAMES]


def trace_row(name: str, n_layers: int | None) -> Trace:
    """Trace a row in this process, which cannot be used afterwards.

    Args:
        name: one of ``NAMES``.
        n_layers: of the model; None for all.
    """
    family, _, rest = name.partition(" ")
    titan, trainer, planned = (
        family == "torchtitan",
        name in trainer_rows.NAMES,
        name in planned_rows.NAMES,
    )
    hardware = h100() if titan else load_hardware(planned_rows.HARDWARE) if planned else a2()

    def published(recorder: OpRecorder) -> None:
        device = torch.device(recorder.device_type, 0)
        depth = {} if n_layers is None else {"n_layers": n_layers}
        if titan:
            sizes = published_torchtitan.Sizes(**depth)
            published_torchtitan.torchtitan_program(recorder, device, sizes, STEPS)
        else:
            first_program(ROWS[family, rest][0], recorder, device, Sizes(**depth), STEPS)

    program = published
    if trainer:
        program = trainer_rows.trainer_row(name, hardware, STEPS, n_layers)
    elif planned:
        program = planned_rows.planned_row(name, STEPS, n_layers)
    return trace_here(
        program,
        attention=hardware.attention,
        world_size=int(rest) if titan else 1 if planned else trainer_rows.RANKS,
        workspace_bytes=matmul_workspace_bytes(hardware),
    )


def make_traces(names: Iterable[str], folder: Path, jobs: int, n_layers: int | None) -> None:
    """Trace the rows that have no trace in the folder yet, each in its own process."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }

    def make(name: str) -> None:
        words = [sys.executable, __file__, "--trace", name, "--keep", str(folder)]
        words += [] if n_layers is None else ["--layers", str(n_layers)]
        with unit(f"trace of {name}"):
            done = subprocess.run(
                words, capture_output=True, text=True, env=environment, timeout=TIMEOUT_SECONDS
            )
        if done.returncode:
            raise RuntimeError(f"{name} could not be traced:\n{done.stderr}")

    with ThreadPool(jobs) as pool:
        pool.map(make, missing_traces(names, folder), chunksize=1)


def missing_traces(names: Iterable[str], folder: Path) -> list[str]:
    """Rows without a trace in the folder."""
    return [name for name in names if not (folder / file_name(name)).exists()]


def named(words: Iterable[str]) -> list[str]:
    """Rows of these names, or with one of these words first."""
    chosen = {
        name
        for word in words
        for name in NAMES
        if name == word or (word not in NAMES and name.split()[0] == word)
    }
    return [name for name in NAMES if name in chosen]


def render(rows: Rows) -> tuple[str, bool]:
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
    lines = ["# The planner against published runs", "", *about(), ""]
    today = trainers_rows(rows)
    if today:
        lines += [
            "## 1. Today's trainer with the switches of the first table",
            "",
            *trainer_table(today),
            "",
        ]
    for title, findings, notes in sections:
        if findings:
            lines += [f"## {title}", ""]
            lines += [
                f"- Fitted: {note}" if "from “" in note or note.startswith("both") else f"- {note}"
                for note in notes
            ]
            lines += [""] * bool(notes)
            lines += [
                "| row | | published | predicted | error | bar | |",
                "|---|---|---:|---:|---:|---:|---|",
            ]
            lines += [f"| {' | '.join(finding.cells())} |" for finding in findings] + [""]
    planned = rows_of_h200(rows)
    if planned:
        lines += [
            "## 5. Today's trainer on one H200: predicted, not measured",
            "",
            *planned_table(planned),
            "",
        ]
    missed = [finding for _, findings, _ in sections for finding in findings if not finding.met]
    lines += [
        "## 8. Other validation",
        "",
        (
            "- Real allocations on a CPU, in order, against those of a trace: "
            "`tests/plan/test_real_allocations.py`."
        ),
        "- Memory and steps of one H200: `benchmarks/gpu_planned.md`.",
        "",
        f"{len(missed)} of {sum(len(findings) for _, findings, _ in sections)} bars missed.",
    ]
    above = failures(today)
    if today:
        lines += [
            "",
            f"{above} of {2 * len(today)} cells of today's trainer are above the published value.",
        ]
    return "\n".join(lines) + "\n", not missed and not above


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
    with progress(planned_layouts.count_traces(rows)):
        results = planned_layouts.plan_layouts(rows)
    lines, met = planned_layouts.render_layouts(rows, results)
    print("\n".join([*about()[:2], *lines]))
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
        "--rows", nargs="+", default=NAMES, metavar="ROW", help="names of rows, or their first word"
    )
    parser.add_argument("--write", type=Path, help="Markdown file for the page")
    parser.add_argument("--keep", type=Path, help="folder for new and existing traces")
    parser.add_argument("--jobs", type=int, default=1, help="rows to trace concurrently")
    parser.add_argument(
        "--layers",
        type=int,
        help="blocks of the model, for a quick run; the published models have 32",
    )
    parser.add_argument(
        "--errors", type=int, metavar="N", help="compare estimates with N runs' full traces only"
    )
    parser.add_argument(
        "--searches", type=int, metavar="N", help="check N random searches by brute force only"
    )
    parser.add_argument(
        "--layouts", nargs="*", metavar="ROW", help="published layouts only, all or those named"
    )
    parser.add_argument(
        "--trace", choices=NAMES, metavar="ROW", help="trace one row into --keep and exit"
    )
    args = parser.parse_args()
    if not all(map(named, ([word] for word in args.rows))):
        parser.error(f"--rows must be of: {', '.join(NAMES)}")
    args.rows = named(args.rows)
    if args.trace:
        made = trace_row(args.trace, args.layers)
        with open(args.keep / file_name(args.trace), "wb") as file:
            pickle.dump(made, file, protocol=pickle.HIGHEST_PROTOCOL)
        return 0
    if args.errors is not None or args.searches is not None:
        return check_estimate(args.errors or 0, args.searches or 0, args.jobs)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if args.layouts is not None:
            return check_layouts(args.layouts)
        with progress(len(missing_traces(args.rows, folder)) + 1):
            make_traces(args.rows, folder, args.jobs, args.layers)
            with unit("replays and fits"):
                page, met = render(Rows(folder, args.rows))
    print(page)
    if args.write:
        args.write.write_text(page)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
