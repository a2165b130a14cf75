"""Time cost and memory savings of each memory switch, on one device that stands for one of many
ranks.

    python scripts/benchmarks/bench_memory.py --write benchmarks/memory_h200.md
    python scripts/benchmarks/bench_memory.py --write PAGE.md --resume --seconds 570  # while 75
    python scripts/benchmarks/bench_memory.py --strategies fsdp2 --rows plain gc "gc chunk oo"
    python scripts/benchmarks/bench_memory.py --device cpu --model llama_debug --seq-len 64

One process is rank 0 of a world of ``--world-size`` without the other ranks (PyTorch's ``fake``
process group): kernels, streams and the allocator are real, nothing is sent, and the values are of
no meaning. A gather copies this rank's shard into each part of its output, which moves twice the
bytes of the output through the device's memory. A reduce-scatter is made to write zeros, so that
gradients are finite; in torch 2.11 it leaves its output as allocated. A row with a skipped update
fails.

Each row is the project's own trainer in a process of its own, with fp32 parameters, bf16 compute,
fp32 reduction and AdamW, as in the table for comparison of the memory columns: the first README of
this project, 8 Ascend A2 NPUs, Llama2-7B, batch 1, sequence 4096, torch 2.7.1. Its times were those
of another device with communication, so they are not compared.

Columns: median seconds of the steps after the warm-up; that over the time of the row that the
switch was added to; GiB allocated at the end of a step, at the peak of the steps after the warm-up,
and reserved by the allocator. On a CPU the first two are counted, and there is no reserved memory.
Rows lie in a JSON file beside the page; with ``--resume`` they are not measured again, and the exit
status is 75 while rows are left for another call. Otherwise the status is 1 where a target of the
last lines, which are an accelerator's, is missed.
"""

import argparse
import json
import subprocess
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from fsdptoys.config.compose import compose_config
from fsdptoys.device import (
    DEVICE_TYPES,
    Device,
    available_device_type,
)
from fsdptoys.errors import ConfigError
from fsdptoys.launch.hardware import hardware_environment
from fsdptoys.metrics import StepMetrics
from fsdptoys.train.trainer import Trainer
from scripts.benchmarks.fake_collectives import reduce_to_zeros
from scripts.benchmarks.memory_page import gib, judge, render
from scripts.benchmarks.memory_rows import CLASSIC, ROWS, Result, row_cores
from scripts.benchmarks.peers.ours import fill
from scripts.benchmarks.step_counts import pretend
from scripts.common.child_environment import child_environment
from scripts.common.finished_rows import ROWS_LEFT, FinishedRows
from scripts.common.machine import machine, without_clocks
from scripts.common.progress import progress, unit

LEAST_SECONDS = 20.0
"""A row is not begun with less."""
ROW_OPTIONS = ("device", "model", "world_size", "seq_len", "steps", "warmup_steps")
"""Arguments on which a row's figures depend."""


def main() -> int:
    """Run the rows, print and write the table; 0 if every target that could be asked is met."""
    args = parse_arguments()
    if args.one:
        print(json.dumps(vars(measure(args))), flush=True)
        return 0
    results: dict[tuple[str, str], Result] = {}
    pairs = rows_of(args)
    with progress(len(pairs)):
        rows = open_rows(args)
        for strategy, name in pairs:
            with unit(f"{strategy} {name}") as progress_unit:
                results[strategy, name] = result = measured_row(
                    rows, args, strategy, name
                )
                progress_unit.note = (
                    result.failure
                    or f"{result.seconds:.3f} s, reserved {gib(result.reserved_gib)} GiB"
                )
    classic = (args.model, args.world_size, args.seq_len) == CLASSIC
    if args.device == "cpu":
        verdicts = [
            "The targets are those of an accelerator; on a CPU nothing is held against them."
        ]
    else:
        verdicts = judge(results, classic)
    page = render(args, results, verdicts, classic)
    print(page)
    if args.write:
        args.write.write_text(page)
    if args.resume and rows.left:
        return ROWS_LEFT
    return 1 if any(verdict.startswith("missed") for verdict in verdicts) else 0


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_row_arguments(parser)
    parser.add_argument(
        "--one",
        nargs=2,
        metavar=("STRATEGY", "ROW"),
        help="measure one row here and print JSON",
    )
    args = parser.parse_args()
    if args.warmup_steps >= args.steps:
        parser.error("--warmup-steps must leave a step to measure")
    return args


def add_row_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select rows and their settings."""
    parser.add_argument(
        "--device", choices=DEVICE_TYPES, default=available_device_type()
    )
    parser.add_argument("--model", default="llama2_7b")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup-steps", type=int, default=3)
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=["fsdp1", "fsdp2"],
        default=["fsdp1", "fsdp2"],
    )
    parser.add_argument(
        "--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW"
    )
    parser.add_argument(
        "--cores",
        type=int,
        help="CPU cores of a rank; by default a device's share of this machine's",
    )
    parser.add_argument(
        "--seconds", type=float, help="for all rows of this call; by default no limit"
    )
    parser.add_argument(
        "--row-seconds",
        type=float,
        default=600.0,
        help="a row that takes longer has failed",
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="PAGE.md",
        help="a Markdown file for the table; rows to PAGE.json",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the rows of PAGE.json; exit status 75 if any are left",
    )


def rows_of(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Strategy and name of each requested row that the strategy has."""
    return [
        (strategy, name)
        for strategy in args.strategies
        for name in args.rows
        if ROWS[name].only in (None, strategy)
    ]


def open_rows(args: argparse.Namespace) -> FinishedRows:
    """Return the rows of earlier calls with the same settings."""
    settings = {name: getattr(args, name) for name in ROW_OPTIONS}
    settings |= {
        "cores": row_cores(args),
        "machine": without_clocks(machine(args.device)),
    }
    path = args.write.with_suffix(".json") if args.write else None
    return FinishedRows(path, settings, args.resume, args.seconds)


def measured_row(
    rows: FinishedRows, args: argparse.Namespace, strategy: str, name: str
) -> Result:
    """Return a row of an earlier call, or measure it within the time that is left."""
    row = rows.measure(
        f"{strategy} {name}",
        lambda seconds: vars(run_row(args, strategy, name, seconds)),
        args.row_seconds,
        LEAST_SECONDS,
    )
    if row is None:
        return Result(failure="left out: the call's time was over", refused=True)
    return Result(**row)


def run_row(
    args: argparse.Namespace, strategy: str, name: str, seconds: float
) -> Result:
    """Measure one row in a fresh process, so that no row sees the allocator of another."""
    command = [sys.executable, __file__, "--one", strategy, name]
    for option in ROW_OPTIONS:
        command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    present = child_environment()
    environment = hardware_environment(args.device, 1, row_cores(args), False, present)
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=present | environment,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return Result(failure=f"not done after {seconds:.0f} s")
    lines = process.stdout.splitlines()
    if process.returncode or not lines:
        return Result(
            failure=(process.stderr.strip().splitlines() or ["no output"])[-1]
        )
    return Result(**json.loads(lines[-1]))


def row_overrides(args: argparse.Namespace, strategy: str, name: str) -> list[str]:
    """Overrides of a row."""
    line = (
        f"model={args.model} parallel={strategy} experiment=null launch.device={args.device} "
        "parallel.param_dtype=bfloat16 optim.implementation=auto metrics.console=none "
        f"metrics.log_every=1 train.seq_len={args.seq_len} train.batch_size=1 "
        f"train.steps={args.steps}"
    )
    return [*line.split(), *ROWS[name].overrides]


def measure(args: argparse.Namespace) -> Result:
    """Be rank 0 of a world without other ranks, and take the steps of one row."""
    strategy, name = args.one
    config = compose_config(row_overrides(args, strategy, name))
    try:
        config.validate(args.world_size, args.device)
    except ConfigError as error:
        return Result(failure=str(error), refused=True)
    if args.device == "cpu":
        torch.set_num_threads(1)
    Device(args.device, 0)
    pretend(args.world_size)
    reduce_to_zeros()
    steps: list[StepMetrics] = []
    try:
        # Values drawn on the device: those of a real start take a minute, or under FSDP1 all
        # parameters of all ranks.
        trainer = Trainer(config, param_init=fill)

        def on_step(step: StepMetrics) -> None:
            steps.append(step)
            if step.step == args.warmup_steps:
                trainer.world.device.reset_peak_memory()

        trainer.train(on_step)
    except Exception as error:
        traceback.print_exc()
        return Result(
            failure=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
    if any(step.skipped for step in steps):
        return Result(
            failure="an update was skipped: a loss or gradient was not finite"
        )
    measured = steps[args.warmup_steps :]
    times = sorted(step.step_time_seconds for step in measured)
    last = measured[-1]
    return Result(
        seconds=times[len(times) // 2],
        end_gib=last.memory_allocated_gib,
        peak_gib=last.memory_peak_gib,
        reserved_gib=last.memory_reserved_gib,
    )


if __name__ == "__main__":
    sys.exit(main())
