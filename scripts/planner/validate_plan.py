"""Compare the planner's simulator with published measurements; exit with 1 if an error exceeds its
bar.

    python scripts/planner/validate_plan.py python scripts/planner/validate_plan.py --rows "fsdp2
    block gc" "torchtitan 8" python scripts/planner/validate_plan.py --rows h200 python
    scripts/planner/validate_plan.py --write benchmarks/plan.md --jobs 2 python
    scripts/planner/validate_plan.py --errors 60 --searches 100 --jobs 2

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
import dataclasses
import os
import pickle
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from datetime import date
from multiprocessing.pool import ThreadPool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.device.profile import Hardware, load_hardware
from fsdptoys.plan.calibrate import Case, calibrate, choose_parameters
from fsdptoys.plan.simulator.allocator import build_allocator
from fsdptoys.plan.simulator.events import Trace
from fsdptoys.plan.simulator.replay import Replay, replay
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
from scripts.planner.planned_rows import PlannedRow, planned_config, planned_table
from scripts.planner.published_layouts import read_layouts
from scripts.planner.published_llama2 import Sizes
from scripts.planner.published_programs import ROWS, first_program
from scripts.planner.published_torchtitan import h100
from scripts.planner.trainer_rows import TrainerRow, failures, trainer_table
from tests.harness.full_trace import trace_here

GIB = 2**30
STEPS = 3
TIMEOUT_SECONDS = 900.0

END_BAR_GIB = 0.01
RESERVED_BARS = {"fsdp1": 0.10, "fsdp2": 0.04}
SECONDS_BAR, OFFLOAD_SECONDS_BAR = 0.08, 0.15
TORCHTITAN_RESERVED_BAR, TORCHTITAN_SECONDS_BAR = 0.04, 0.06

FITTED_ROW = "block"
TRANSFER_ROW, ADAM_ROW = ("fsdp2", "block gc chunk oo"), ("fsdp2", "block gc chunk co")
TORCHTITAN = {
    8: published_torchtitan.Published(5762, 82.4),
    128: published_torchtitan.Published(5605, 67.0),
}
PUBLISHED = [*(" ".join(key) for key in ROWS), *(f"torchtitan {ranks}" for ranks in TORCHTITAN)]
NAMES = [*trainer_rows.NAMES, *PUBLISHED, *planned_rows.NAMES]


def a2() -> Hardware:
    """Hardware of the first table."""
    return load_hardware("a2")


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


def file_name(row: str) -> str:
    """File name of a row's trace."""
    return row.replace(" ", "_") + ".pickle"


def named(words: Iterable[str]) -> list[str]:
    """Rows of these names, or with one of these words first."""
    chosen = {
        name
        for word in words
        for name in NAMES
        if name == word or (word not in NAMES and name.split()[0] == word)
    }
    return [name for name in NAMES if name in chosen]


class Rows:
    """Traced rows and their replays.

    Args:
        folder: contains the traces.
        names: of the rows.
    """

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.traces: dict[str, Trace] = {}
        for name in names:
            with open(folder / file_name(name), "rb") as file:
                self.traces[name] = pickle.load(file)

    def replay(
        self, name: str, hardware: Hardware, allocator: AllocatorKind = AllocatorKind.expandable
    ) -> Replay:
        """Replay a row; both programs asked for expandable segments."""
        return replay(
            self.traces[name],
            hardware,
            build_allocator(allocator, device_type=hardware.device_type),
        )

    def seconds(self, name: str) -> Callable[[Hardware], float]:
        """Seconds of a row's step, as a function of the hardware."""
        return lambda hardware: self.replay(name, hardware).time().step_seconds

    def fit(self, name: str, published: float, hardware: Hardware, parameter: str) -> Hardware:
        """Fit one rate to a row's time."""
        return calibrate(
            [Case(self.seconds(name), published, name)], hardware, choose_parameters([parameter])
        ).hardware


def trainers_rows(rows: Rows) -> list[TrainerRow]:
    """The first table's rows, as today's trainer runs them."""
    made = []
    for row, key in trainer_rows.NAMES.items():
        if row in rows.traces:
            replayed = rows.replay(row, a2())
            memory, seconds = replayed.memory(), replayed.time().step_seconds
            made.append(
                TrainerRow(
                    row, ROWS[key][1], memory.end_bytes / GIB, memory.reserved_bytes / GIB, seconds
                )
            )
    return made


def rows_of_h200(rows: Rows) -> list[PlannedRow]:
    """Today's trainer on one H200."""
    hardware = load_hardware(planned_rows.HARDWARE)
    names = [name for name in planned_rows.NAMES if name in rows.traces]
    return [PlannedRow(name, planned_config(name), rows.replay(name, hardware)) for name in names]


def classic_memory(rows: Rows) -> list[Finding]:
    """The first table: allocated at the end of a step, and reserved."""
    hardware, findings = a2(), []
    for (strategy, name), (_, published) in ROWS.items():
        row = f"{strategy} {name}"
        if row in rows.traces:
            memory = rows.replay(row, hardware).memory()
            end, reserved = memory.end_bytes / GIB, memory.reserved_bytes / GIB
            findings.append(
                Finding(row, "GiB at end", published.end_gib, end, END_BAR_GIB, relative=False)
            )
            bar = RESERVED_BARS[strategy]
            findings.append(Finding(row, "GiB reserved", published.reserved_gib, reserved, bar))
    return findings


def classic_time(rows: Rows, fit_host: bool) -> tuple[list[Finding], list[str]]:
    """The first table: step times of all rows outside the fit.

    Args:
        rows: traced.
        fit_host: whether to fit the two rates that only offload depends on.

    Returns:
        The findings; notes on fitted rates.
    """
    findings, fitted = [], []
    for strategy in ("fsdp2", "fsdp1"):
        base = f"{strategy} {FITTED_ROW}"
        if base not in rows.traces:
            continue
        hardware = rows.fit(base, ROWS[strategy, FITTED_ROW][1].seconds, a2(), "compute")
        used = {base}
        fitted.append(
            f"{strategy}: {hardware.matmul_efficiency.value:.3f} of the peak in matmuls, from "
            f"“{base}”"
        )
        if fit_host and all(" ".join(key) in rows.traces for key in (TRANSFER_ROW, ADAM_ROW)):
            # FSDP2's rows give both rates, on a node with FSDP2's matmul speed.
            theirs = rows.fit(
                f"fsdp2 {FITTED_ROW}", ROWS["fsdp2", FITTED_ROW][1].seconds, a2(), "compute"
            )
            for key, parameter in (
                (TRANSFER_ROW, "latency of transfers"),
                (ADAM_ROW, "AdamW on the host"),
            ):
                theirs = rows.fit(" ".join(key), ROWS[key][1].seconds, theirs, parameter)
                used.add(" ".join(key))
            hardware = dataclasses.replace(
                hardware,
                transfer_latency_seconds=theirs.transfer_latency_seconds,
                cpu_adam_parameters_per_second=theirs.cpu_adam_parameters_per_second,
            )
            if strategy == "fsdp2":
                latency, rate = (
                    theirs.transfer_latency_seconds.value,
                    theirs.cpu_adam_parameters_per_second.value,
                )
                fitted.append(
                    f"both: {latency * 1e3:.2f} ms a transfer, {rate / 1e6:.0f} million "
                    "parameters a second"
                )
        for (owner, name), (switches, published) in ROWS.items():
            row = f"{owner} {name}"
            if owner == strategy and row in rows.traces and row not in used:
                offload = switches.optimizer_offload or switches.cpu_offload
                bar = OFFLOAD_SECONDS_BAR if offload else SECONDS_BAR
                findings.append(
                    Finding(row, "s a step", published.seconds, rows.seconds(row)(hardware), bar)
                )
    return findings, fitted


def torchtitan(rows: Rows) -> tuple[list[Finding], list[str]]:
    """torchtitan's table: reserved memory, and tokens per second on the larger number of ranks."""
    findings, notes = [], []
    for ranks, published in TORCHTITAN.items():
        row = f"torchtitan {ranks}"
        if row in rows.traces:
            reserved = rows.replay(row, h100()).memory().reserved_bytes / GIB
            native = rows.replay(row, h100(), AllocatorKind.native).memory().reserved_bytes / GIB
            bar = TORCHTITAN_RESERVED_BAR
            findings.append(Finding(row, "GiB reserved", published.reserved_gib, reserved, bar))
            notes.append(f"{row}: {native:.2f} GiB with native segments")
            seconds, before = published.step_seconds, rows.seconds(row)(h100())
            notes.append(
                f"{row}: {seconds:.2f} s a step, {seconds / before:.2f} times the {before:.2f} s "
                "without a fit"
            )
    few, many = (f"torchtitan {ranks}" for ranks in TORCHTITAN)
    if few in rows.traces and many in rows.traces:
        hardware = rows.fit(few, TORCHTITAN[8].step_seconds, h100(), "compute")
        notes.append(f"{hardware.matmul_efficiency.value:.3f} of the peak in matmuls, from “{few}”")
        predicted = TORCHTITAN[128].tokens / rows.seconds(many)(hardware)
        rate = TORCHTITAN[128].tokens_per_second
        findings.append(Finding(many, "tokens/s a GPU", rate, predicted, TORCHTITAN_SECONDS_BAR))
    return findings, notes


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
            f"- torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPU "
            "cores"
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
