"""Costs that grow with the number of ranks: measured on a few, counted among thousands, planned for
16,384.

    python scripts/benchmarks/bench_scaling.py --write benchmarks/scaling.md  # five minutes

1. Measured: 1, 2, 4 and 8 real ranks on this machine's CPU (gloo), each with the same model and
   batch, FSDP2 with a copy for two ranks (``mesh.fsdp_size=2``). Ranks share the cores, so that
   seconds on the clock grow with their number by themselves; the cost of a rank is its CPU time, in
   the next column. Start-up is the whole command with one step; the rest is taken in forked ranks.
   A step's numbers are medians, the other ones are of one time.
2. Counted: rank 0's step in worlds up to 16,384 without the other ranks (``step_counts.py``).
3. Planned: predictions of ``fsdptoys plan``. Messages are those of rings: N - 1 per rank for a
   gather or a scatter over N ranks, twice that for an all-reduce; libraries use trees where these
   are many.

Prints Markdown.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.device import GIB
from fsdptoys.device.profile import load_hardware
from fsdptoys.metrics.prediction import Volume
from fsdptoys.plan.predict import predict
from fsdptoys.plan.search.switches import node_ranks_of, validate_switches
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.tables import markdown_table
from scripts.benchmarks.step_counts import count_step, pretend
from scripts.common.child_environment import child_environment
from scripts.common.configured import configured
from scripts.common.machine import machine
from scripts.common.page import command_line, page_parser, publish
from scripts.common.progress import progress, unit
from tests.harness.ranks import run_ranks

WARMUP = 5
MOST_FLAT = 512
"""Ranks up to which one copy of all of them is planned as well: tracing cuts each parameter into as
many pieces."""
MEASURED = "model=llama_debug model.dim=256 model.ffn_dim=704 train.batch_size=2 train.seq_len=128"
COUNTED = "model=llama_debug train.batch_size=1 train.seq_len=16 mesh.fsdp_size=node"
PLANNED = (
    "parallel=fsdp2 parallel.param_dtype=bfloat16 memory.chunk_loss=true train.seq_len=4096 "
    "memory.gradient_checkpointing=selective experiment=null"
)
MIB = 2**20


@dataclass(frozen=True)
class Cost:
    """Cost of an action on one rank."""

    wall: float
    cpu: float


@contextmanager
def timed(into: dict[str, Cost], name: str) -> Iterator[None]:
    """Note seconds on the clock and of this process's CPU."""
    wall = time.perf_counter()
    cpu = time.process_time()
    yield
    into[name] = Cost(time.perf_counter() - wall, time.process_time() - cpu)


def rank_costs(config: Config, resumed: Config) -> dict[str, Cost]:
    """Costs of this rank: initialization, a step, a checkpoint, and going on from it.

    Args:
        config: takes steps, and saves after the last.
        resumed: goes on from there, and takes no step.
    """
    costs: dict[str, Cost] = {}
    steps: list[Cost] = []
    dist.barrier()
    with timed(costs, "initialize"):
        trainer = Trainer(config)
    run = Run(trainer)
    save = run._save

    @contextmanager
    def around(step: int) -> Iterator[None]:
        one: dict[str, Cost] = {}
        with timed(one, "step"):
            yield
        steps.append(one["step"])

    def timed_save(stop: Any) -> None:
        dist.barrier()
        with timed(costs, "save"):
            save(stop)

    trainer.around_step = around
    run._save = timed_save  # type: ignore[method-assign]
    run.run()
    again = Run(Trainer(resumed))
    go_on = again._resume

    def timed_load() -> None:
        dist.barrier()
        with timed(costs, "load"):
            go_on()

    again._resume = timed_load  # type: ignore[method-assign]
    again.run()
    measured = steps[WARMUP:]
    costs["step"] = Cost(
        statistics.median(cost.wall for cost in measured),
        statistics.median(cost.cpu for cost in measured),
    )
    return costs


def command_cost(command_line: str, ranks: int) -> Cost:
    """Seconds on the clock of ``fsdptoys train`` with one step, and CPU seconds of each rank's
    share of it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    line = (
        f"-m fsdptoys train {command_line} train.steps=1 launch.nproc_per_node={ranks}"
    )
    subprocess.run(
        [sys.executable, *line.split()],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=child_environment(),
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(time.perf_counter() - started, cpu / ranks)


def measured_rows(worlds: Sequence[int], steps: int) -> Iterator[list[str]]:
    """A row of the first table for each world."""
    for ranks in worlds:
        with tempfile.TemporaryDirectory() as folder:
            common = f"{MEASURED} metrics.console=none mesh.fsdp_size={min(2, ranks)}"
            saves = f"train.steps={steps} checkpoint.every={steps} metrics.run_dir={folder}/run"
            overrides = f"{common} {saves}".split()
            first = configured(overrides, ranks)
            resumed = configured([*overrides, "checkpoint.resume=must"], ranks)
            with unit(f"measured, {ranks} ranks"):
                rank_results = run_ranks(ranks, rank_costs, first, resumed)
            command = f"{common} experiment=null launch.device=cpu metrics.run_dir={folder}/command"
            with unit(f"command, {ranks} ranks"):
                start = command_cost(command, ranks)
        cells = [f"{start.wall:.1f} / {start.cpu:.1f}"]
        for name in ("initialize", "step", "save", "load"):
            # The slowest rank's clock, and a rank's CPU time on average.
            wall = max(costs[name].wall for costs in rank_results)
            cpu = statistics.mean(costs[name].cpu for costs in rank_results)
            cells.append(f"{1e3 * wall:.0f} / {1e3 * cpu:.0f}")
        yield [str(ranks), *cells]


def numbers(
    overrides: Sequence[str], world_size: int
) -> tuple[int, int, int, float, float]:
    """Lines of ours, calls of Python, collectives and MiB that a rank sends, in one step of an
    imagined world.

    Returns:
        These, and CPU seconds of the initialization, mesh and groups included, when all is
        imported.
    """
    counted, collectives, _ = count_step(overrides, world_size)
    pretend(world_size)
    config = configured(overrides, world_size, 8)
    started = time.process_time()
    Trainer(config)
    seconds = time.process_time() - started
    sent = sum(call.sends_bytes for call in collectives) / MIB
    return (
        counted.all_lines,
        sum(counted.calls.values()),
        len(collectives),
        sent,
        seconds,
    )


def counted_rows(worlds: Sequence[int]) -> Iterator[list[str]]:
    """A row of the second table for each world."""
    for world_size in worlds:
        with unit(f"counted, world of {world_size:,}"):
            ((lines, calls, collectives, sent, seconds),) = run_ranks(
                1, numbers, COUNTED.split(), world_size
            )
        counts = [f"{world_size:,}", f"{lines:,}", f"{calls:,}", str(collectives)]
        yield [*counts, f"{sent:.2f}", f"{1e3 * seconds:.0f}"]


def messages(volumes: Iterable[Volume]) -> int:
    """That a rank sends in a step, if every collective goes around a ring."""
    return sum(
        volume.calls
        * (2 if volume.collective == "all_reduce" else 1)
        * (volume.group_size - 1)
        for volume in volumes
    )


def planned_sizes(world_size: int) -> tuple[str, ...]:
    """Values of ``mesh.fsdp_size`` that a world is planned with."""
    return ("node", "-1") if 8 < world_size <= MOST_FLAT else ("node",)


def planned_rows(
    model: str, hardware_name: str, worlds: Sequence[int]
) -> Iterator[list[str]]:
    """Rows of the third table for each world: a copy a machine, and a copy of all ranks where one
    can be cut so."""
    hardware = load_hardware(hardware_name)
    for world_size in worlds:
        for size in planned_sizes(world_size):
            config = compose_config(
                f"{PLANNED} model={model} mesh.fsdp_size={size}".split()
            )
            validate_switches(
                config,
                world_size,
                hardware.device_type,
                node_ranks_of(config, hardware, world_size),
            )
            with unit(f"planned, {world_size:,} ranks, mesh.fsdp_size={size}"):
                prediction = predict(config, hardware, world_size)
            volumes = prediction.time.volumes
            sent = sum(volume.bytes for volume in volumes) / GIB
            calls = sum(volume.calls for volume in volumes)
            yield [
                f"{world_size:,}", f"`{size}`", f"{prediction.memory.peak_bytes / GIB:.2f}",
                f"{prediction.memory.reserved_bytes / GIB:.2f}",
                f"{1e3 * prediction.time.step_seconds:.0f}",
                f"{1e3 * prediction.time.exposed_communication_seconds:.0f}", f"{sent:.1f}",
                str(calls), f"{messages(volumes):,}",
                f"{prediction.tokens_per_second / world_size:,.0f}",
            ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, count and plan, and print the tables."""
    parser = page_parser(__doc__)
    ints: dict[str, Any] = {"type": int, "nargs": "*"}
    parser.add_argument("--ranks", **ints, default=[1, 2, 4, 8], help="to measure with")
    parser.add_argument(
        "--steps", type=int, default=30, help=f"of each, the first {WARMUP} not counted"
    )
    worlds = [16, 128, 1024, 16384]
    parser.add_argument("--counted", **ints, default=worlds, help="worlds to count in")
    worlds = [8, 64, 512, 4096, 16384]
    parser.add_argument("--planned", **ints, default=worlds, help="worlds to plan for")
    parser.add_argument("--model", default="llama3_8b", help="to plan for")
    parser.add_argument("--hardware", default="h100", help="to plan for")
    args = parser.parse_args(argv)
    measured = ["ranks", "command with one step", "initialize", "step", "save", "load"]
    counted = [
        "ranks", "lines of ours that ran", "calls of functions", "collectives", "MiB sent",
        "CPU ms to initialize",
    ]  # fmt: skip
    planned = [
        "ranks", "`mesh.fsdp_size`", "GiB peak", "GiB reserved", "ms a step",
        "of which waiting for the network", "GiB sent by a rank", "collectives",
        "messages on rings", "tokens/s a device",
    ]  # fmt: skip
    units = 2 * len(args.ranks) + len(args.counted)
    units += sum(len(planned_sizes(world)) for world in args.planned)
    with progress(units):
        tables = [
            [measured, *measured_rows(args.ranks, args.steps)],
            [counted, *counted_rows(args.counted)],
            [planned, *planned_rows(args.model, args.hardware, args.planned)],
        ]
    titles = [
        f"## Measured: `{MEASURED}`, FSDP2, a copy for two ranks\n\n"
        "Each cell: on the clock, slowest rank / CPU time of a rank, mean. The command in "
        "seconds, else ms.",
        f"## Counted: a step of rank 0, `{COUNTED}` on machines of 8",
        f"## Planned: `model={args.model} {PLANNED}` on {args.hardware}, not measured",
    ]
    texts = [
        "# What grows with the number of ranks",
        command_line(argv),
        machine("cpu"),
    ]
    for title, rows in zip(titles, tables, strict=True):
        texts += [title, markdown_table(rows, range(len(rows[0])))]
    publish("\n\n".join(texts), args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
