"""Compare the planner with a real device, on the rows of the memory benchmark.

    python scripts/benchmarks/bench_plan.py --write benchmarks/plan_h200.md
    python scripts/benchmarks/bench_plan.py --measured benchmarks/memory_h200.json
    python scripts/benchmarks/bench_plan.py --device cpu --model llama_debug --seq-len 64 --rows gc

Each row is measured as ``bench_memory.py`` measures it: the project's trainer on one device that
stands for one of ``--world-size`` ranks that send nothing and copy instead. It is predicted from a
trace of all layers, on the device's profile with links as fast as these copies. Then one row of
each strategy (``--calibrate-on``) corrects the profile's speed of compute, and the others are
predicted once more.

``--measured`` reads the rows of an earlier call, or of ``bench_memory.py``: predictions need no
device, so the traces, which take minutes at full depth, may run on another machine. Name the
profile with ``--hardware`` there.

Columns: measured and predicted GiB at the end of a step, at its peak and reserved; seconds,
predicted before and after calibration. On a CPU there is no allocator to ask, and memory is not
compared. Exits with status 1 if a bar is missed, which are an accelerator's: the end within 0.01
GiB, the peak within 2%, reserved memory within 5%, the time of rows that compute on the device
alone within 20% before and 8% after calibration.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from fsdptoys.config.compose import compose_config
from fsdptoys.device import GIB
from fsdptoys.device.profile import Hardware, Quantity, hardware_for, load_hardware
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.plan.calibrate import Case, calibrate, choose_parameters
from fsdptoys.plan.predict import predict
from scripts.benchmarks.bench_memory import (
    ROW_OPTIONS,
    add_row_arguments,
    measured_row,
    open_rows,
    row_overrides,
    rows_of,
)
from scripts.benchmarks.memory_rows import ROWS, Result
from scripts.common.finished_rows import ROWS_LEFT
from scripts.common.machine import device_name, machine
from scripts.common.progress import progress, unit

END_GIB = 0.01
PEAK = 0.02
RESERVED = 0.05
UNCALIBRATED = 0.20
CALIBRATED = 0.08
"""Bars: GiB, and shares of the measured value."""


@dataclass(frozen=True)
class Compared:
    """A row, measured and predicted."""

    measured: Result
    before: Prediction
    after: Prediction
    on_device: bool
    """Whether the device does all the work, so that the bars on time hold."""


Predict = Callable[[Hardware], Prediction]


def main() -> int:
    """Measure, predict, print and write the table; 0 if every bar is met."""
    args = parse_arguments()
    saved = read_measured(args) if args.measured else None
    # The rows may be another machine's
    name = args.machine if args.measured else device_name(args.device)
    profile = args.hardware or hardware_for(name, args.device)
    if profile is None:
        print(f"no profile of {name}; name one with --hardware", file=sys.stderr)
        return 2
    hardware = copies_for_links(load_hardware(profile), args.world_size)
    measured: dict[tuple[str, str], Result] = {}
    predictors: dict[tuple[str, str], Predict] = {}
    pairs = rows_of(args)
    with progress(len(pairs) + 1):
        rows_of_device = None if saved is not None else open_rows(args)
        for strategy, name in pairs:
            with unit(f"{strategy} {name}") as progress_unit:
                if rows_of_device is not None:
                    result = measured_row(rows_of_device, args, strategy, name)
                else:
                    result = saved.get(
                        f"{strategy} {name}", Result(failure="not measured")
                    )
                measured[strategy, name] = result
                progress_unit.note = result.failure or f"{result.seconds:.3f} s"
                if not result.failure:
                    predictors[strategy, name] = predictor(args, strategy, name)
        with unit("predictions and calibration"):
            rows = compare(measured, predictors, hardware, args.calibrate_on)
    verdicts = (
        judge(rows)
        if args.device != "cpu"
        else ["The bars are those of an accelerator."]
    )
    page = render(args, profile, rows, measured, verdicts)
    print(page)
    if args.write:
        args.write.write_text(page)
    if args.resume and rows_of_device is not None and rows_of_device.left:
        return ROWS_LEFT
    return 1 if any(verdict.startswith("missed") for verdict in verdicts) else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_row_arguments(parser)
    parser.add_argument(
        "--hardware", help="a profile, or a YAML file; by default that of the device"
    )
    parser.add_argument(
        "--calibrate-on", choices=list(ROWS), default="gc", metavar="ROW"
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="ROWS.json",
        help="rows of an earlier call; measure none",
    )
    return parser.parse_args()


def read_measured(args: argparse.Namespace) -> dict[str, Result]:
    """The rows of ``--measured``; their device, model, ranks, length and steps become this
    call's."""
    tree = json.loads(args.measured.read_text())
    for name in (*ROW_OPTIONS, "machine"):
        setattr(args, name, tree["settings"][name])
    return {key: Result(**row) for key, row in tree["rows"].items()}


def copies_for_links(hardware: Hardware, world_size: int) -> Hardware:
    """The same device with links as fast as the fake group's copies, which read and write each byte
    of a gather.

    Reduce-scatters are predicted alike, although they write their output alone.
    """
    source = "copies within the device's memory"
    bytes_per_second = (
        hardware.memory_bandwidth.value * hardware.memory_efficiency.value
    )
    speed = Quantity(bytes_per_second / 2 * (world_size - 1) / world_size, source)
    whole = Quantity(1.0, source)
    none = Quantity(1e-30, source)
    return dataclasses.replace(
        hardware,
        intra_node_bandwidth=speed,
        inter_node_bandwidth=speed,
        intra_node_efficiency=whole,
        inter_node_efficiency=whole,
        intra_node_latency_seconds=none,
        inter_node_latency_seconds=none,
    )


def predictor(args: argparse.Namespace, strategy: str, name: str) -> Predict:
    """Return a function that predicts a row."""
    config = compose_config(row_overrides(args, strategy, name))
    config.validate(args.world_size, args.device)
    return lambda hardware: predict(config, hardware, args.world_size)


def compare(
    measured: dict[tuple[str, str], Result],
    predictors: dict[tuple[str, str], Predict],
    hardware: Hardware,
    calibrate_on: str,
) -> dict[tuple[str, str], Compared]:
    """Predict every row before and after one row of its strategy has corrected the speed of
    compute."""
    rows = {}
    for strategy in dict.fromkeys(strategy for strategy, _ in predictors):
        corrected = hardware
        base = predictors.get((strategy, calibrate_on))
        if base is not None:
            seconds = measured[strategy, calibrate_on].seconds
            assert seconds is not None
            case = Case(
                lambda one, base=base: base(one).time.step_seconds,
                seconds,
                calibrate_on,
            )  # type: ignore[misc]
            corrected = calibrate(
                [case], hardware, choose_parameters(["compute", "memory"])
            ).hardware
        for (owner, name), row in predictors.items():
            if owner == strategy:
                offloads = any("offload=true" in word for word in ROWS[name].overrides)
                before = row(hardware)
                after = row(corrected)
                rows[owner, name] = Compared(
                    measured[owner, name], before, after, not offloads
                )
    return rows


def judge(rows: dict[tuple[str, str], Compared]) -> list[str]:
    """Every bar, met or missed."""
    verdicts = []
    for (strategy, name), row in rows.items():
        memory = row.before.memory
        result = row.measured
        assert result.seconds is not None
        checks = [
            (
                "seconds, uncalibrated",
                row.before.time.step_seconds,
                result.seconds,
                UNCALIBRATED * result.seconds,
            ),
            (
                "seconds, calibrated",
                row.after.time.step_seconds,
                result.seconds,
                CALIBRATED * result.seconds,
            ),
        ] * row.on_device
        for what, predicted, actual, share in (
            ("GiB at the end", memory.end_bytes, result.end_gib, None),
            ("GiB at the peak", memory.peak_bytes, result.peak_gib, PEAK),
            ("GiB reserved", memory.reserved_bytes, result.reserved_gib, RESERVED),
        ):
            if actual is not None:
                checks.append(
                    (
                        what,
                        predicted / GIB,
                        actual,
                        END_GIB if share is None else share * actual,
                    )
                )
        for what, predicted, actual, bar in checks:
            met = "met" if abs(predicted - actual) <= bar else "missed"
            verdicts.append(
                f"{met}: {strategy} {name}: {predicted:.3f} {what}, measured {actual:.3f}, bar "
                f"±{bar:.3f}"
            )
    return verdicts


def render(
    args: argparse.Namespace,
    profile: str,
    rows: dict[tuple[str, str], Compared],
    measured: dict[tuple[str, str], Result],
    verdicts: list[str],
) -> str:
    """The page as Markdown."""
    lines = [
        (
            f"# The planner against a device: {args.model}, rank 0 of {args.world_size}, batch 1, "
            f"sequence {args.seq_len}"
        ),
        "",
        f"- Command: `python {shlex.join(sys.argv)}`",
        f"- Measured on: {getattr(args, 'machine', None) or machine(args.device)}",
        (
            f"- Predicted with torch {torch.__version__} and the profile {profile}, with links as "
            "fast as the copies"
        ),
        "  within the device that stand for collectives in the measured rows.",
        (
            "- Every cell is measured / predicted; times also after a calibration on the row "
            f"{args.calibrate_on}."
        ),
        "",
        "| strategy | row | GiB at end | GiB peak | GiB reserved | s a step | s calibrated |",
        "|---|---|---|---|---|---|---|",
    ]
    for (strategy, name), result in measured.items():
        row = rows.get((strategy, name))
        if row is None:
            lines.append(f"| {strategy} | {name} | not run: {result.failure} | | | | |")
            continue
        memory = row.before.memory
        pairs = (
            (result.end_gib, memory.end_bytes),
            (result.peak_gib, memory.peak_bytes),
            (result.reserved_gib, memory.reserved_bytes),
        )
        cells = [
            "" if actual is None else f"{actual:.2f} / {predicted / GIB:.2f}"
            for actual, predicted in pairs
        ]
        cells += [
            f"{result.seconds:.3f} / {prediction.time.step_seconds:.3f}"
            for prediction in (row.before, row.after)
        ]
        lines.append(f"| {strategy} | {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {verdict}" for verdict in verdicts)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
