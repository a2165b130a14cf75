"""Compare training under all strategies on the same data, bit by bit.

    python scripts/parity.py --world-sizes 1 2 4 --steps 20

One small model of every family is trained, unless --models names others.

Each row trains the same model with clipping, AdamW, two micro-batches a step (--grad-accum) and
ragged padding, and is compared with one process that runs the same micro-batches in sequence
(``parallel=single parallel.simulated_ranks=N``). A SHA-256 over the final parameters of all rows
follows each table, to compare two versions of the program.

- deterministic mode (``train.deterministic=true``, reductions in float64): losses, gradient norms
  and final parameters must be equal in every bit; with bf16 parameters too.
- default mode: every loss must be within 1e-6 relative of the one process in float32, and FSDP1 and
  FSDP2 must agree in every bit on the same mesh wherever a reduction adds two numbers. Over more
  ranks the order of a ring's additions depends on the position in the buffer, which differs between
  flat and per-parameter sharding: their last bits then differ, and the table says so. With bf16
  parameters FSDP1 accumulates micro-batches in bf16, the others in float32.
- portable mode (``train.sum_dtype=float32 optim.implementation=for_loop``, PyTorch's kernels,
  experts one by one): runs on every device, and is the only mode for NPUs (their collectives have
  no float64). Norms are rounded in the order of sharding, so only strategies with equal sharding
  agree in every bit; every loss is within 1e-6 of the one process in float32. ``--against-cpu``
  also trains every row on CPU ranks in the same arithmetic and prints the difference of the losses,
  which is no breach: another kernel may round otherwise.
- ``--layouts all`` compares layouts of the mesh instead (sequences and experts split over ranks,
  HSDP, combinations) with one ordinary process, gradients included. ``--layouts pairs`` trains only
  two models, in layout mode and float32, on every number of ranks; all else on the smallest that
  fits (``parity_layouts``). ``--inject all`` makes bugs, and reports whether the comparison finds
  each at step 1 (``parity_bugs``).
- the toys (``toy-``) must agree with PyTorch's implementations in every bit, in both modes: toy DDP
  and ZeRO-1 with DDP, toy FSDP with FSDP2. Toy ZeRO-2 and ZeRO-3 reduce after every micro-batch,
  DDP once a step; with --grad-accum 1 and reductions of two numbers they must agree with DDP in
  every bit. Over more ranks, or with several micro-batches, the order of the sums differs in
  default mode, and the bound is 1e-6. ZeRO-3 has no lower precision and is left out there.

Exits with status 1 on any breach.
"""

import argparse
import hashlib
import json
import os
import sys
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from fsdptoys.config.schema import Config
from fsdptoys.device import device_count, float64_collectives, missing_device
from fsdptoys.errors import ConfigError
from scripts.common.configured import configured
from scripts.common.progress import doing, progress, unit
from scripts.equality.layout_table import LAYOUTS
from scripts.equality.parity_bugs import BUGS, compare_all
from scripts.equality.parity_rows import (
    FLOAT32_ONLY,
    MODES,
    PRESETS,
    STRATEGIES,
)
from scripts.equality.parity_verdicts import (
    judge,
    max_loss_difference,
    max_norm_difference,
)
from tests.harness.outcomes import Outcome, train_all
from tests.harness.ranks import run_ranks


def overrides(args: argparse.Namespace, model: str, mode: str, dtype: str) -> list[str]:
    """Overrides common to all rows of a table."""
    line = (
        f"model={model} data=synthetic data.ragged=true train.batch_size=2 "
        f"train.seq_len={args.seq_len} train.steps={args.steps} "
        f"train.grad_accum={args.grad_accum} train.max_grad_norm=0.5 "
        f"parallel.param_dtype={dtype} optim.lr=1e-3 optim.weight_decay_on=all "
        "optim.warmup_steps=2 metrics.console=none"
    )
    return [*line.split(), *MODES[mode]]


def row_config(row_overrides: list[str], world_size: int, device: str) -> Config:
    """Compose and check the configuration of one row."""
    return configured(
        [*row_overrides, f"launch.device={device}"], world_size, device=device
    )


def train_titled(configs: list[Config], titles: list[str]) -> list[Outcome]:
    """Train the configurations as ``train_all`` does; rank 0 announces each as it finishes."""
    outcomes = []
    for config, title in zip(configs, titles, strict=True):
        with unit(title, announce=dist.get_rank() == 0):
            outcomes += train_all([config])
    return outcomes


def train_rows(
    configs: list[Config], titles: list[str], world_size: int, device: str
) -> list[Outcome]:
    """Train rows one after another on fresh ranks; returns rank 0's results."""
    start = "fork" if device == "cpu" else "spawn"
    titles = [f"{title}, {world_size} ranks, {device}" for title in titles]
    if start == "spawn":
        doing(f"{titles[0]} and {len(titles) - 1} more")
    outcomes: list[Outcome] = run_ranks(
        world_size, train_titled, configs, titles, device=device, start=start
    )[0]
    if start == "spawn":  # whose ranks cannot announce anything
        for title in titles:
            with unit(title):
                pass
    return outcomes


def rows_of(strategies: list[str], world_size: int, dtype: str) -> list[str]:
    """The strategies that have a row for a world size and a dtype."""
    names = [
        name for name in strategies if not name.startswith("hsdp") or world_size > 2
    ]
    return [name for name in names if dtype == "float32" or name not in FLOAT32_ONLY]


def count_units(args: argparse.Namespace) -> int:
    """Number of rows of all tables."""
    rows = sum(
        1 + len(rows_of(args.strategies, world, dtype))
        for world in args.world_sizes
        for dtype in args.dtypes
    )
    return len(args.models) * len(args.modes) * rows * (2 if args.against_cpu else 1)


def against(outcome: Outcome, on_cpu: Outcome) -> str:
    """Difference between a device's training and the same on CPU ranks."""
    return (
        "every bit"
        if outcome == on_cpu
        else f"loss {max_loss_difference(outcome, on_cpu):.1e}"
    )


def compare(
    args: argparse.Namespace, model: str, mode: str, dtype: str, console: Console
) -> list[str]:
    """Train and print one table; return the breaches."""
    table = Table(
        title=f"{model}, {dtype}, {mode} mode, {args.steps} steps, {args.device}"
    )
    for column in (
        "ranks",
        "strategy",
        "final loss",
        "max |loss diff| rel",
        "max |grad-norm diff|",
    ):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    table.add_column("parameters equal?")
    table.add_column("against one process")
    if args.against_cpu:
        table.add_column("against CPU ranks")
    common = overrides(args, model, mode, dtype)
    breaches: list[str] = []
    digest = hashlib.sha256()
    for world_size in args.world_sizes:
        names = rows_of(args.strategies, world_size, dtype)
        simulated = [
            *common,
            "parallel=single",
            f"parallel.simulated_ranks={world_size}",
        ]
        singles: dict[str, Outcome] = {}
        trained: dict[str, dict[str, Outcome]] = {}
        for device in [args.device, "cpu"] if args.against_cpu else [args.device]:
            rows = [
                row_config([*common, *STRATEGIES[name].split()], world_size, device)
                for name in names
            ]
            title = f"{model}, {dtype}, {mode}"
            single = f"{title}, one process for {world_size}"
            (singles[device],) = train_rows(
                [row_config(simulated, 1, device)], [single], 1, device
            )
            titles = [f"{title}, {name}" for name in names]
            trained[device] = dict(
                zip(names, train_rows(rows, titles, world_size, device), strict=True)
            )
        reference = singles[args.device]
        outcomes = trained[args.device]
        table.add_section()
        cpu_cells = [against(reference, singles["cpu"])] if args.against_cpu else []
        for outcome in (reference, *outcomes.values()):
            digest.update(json.dumps(outcome.parameters, sort_keys=True).encode())
        table.add_row(
            str(world_size),
            "single",
            f"{reference.losses[-1]:.9f}",
            "",
            "",
            "",
            "",
            *cpu_cells,
        )
        for name, outcome in outcomes.items():
            verdict = judge(
                name, outcomes, reference, world_size, dtype, mode, args.grad_accum
            )
            cpu_cells = (
                [against(outcome, trained["cpu"][name])] if args.against_cpu else []
            )
            breaches += [verdict.breach] if verdict.breach else []
            table.add_row(
                str(world_size),
                name,
                f"{outcome.losses[-1]:.9f}",
                f"{max_loss_difference(outcome, reference):.1e}",
                f"{max_norm_difference(outcome, reference):.1e}",
                "yes" if outcome.parameters == reference.parameters else "no",
                verdict.text,
                *cpu_cells,
            )
    console.print(table)
    console.print(f"parameters of all rows: sha256 {digest.hexdigest()}\n")
    return breaches


def check_device(device: str, against_cpu: bool) -> None:
    """Reject a missing device, and a comparison of CPU ranks with themselves, with a
    ConfigError."""
    if device_count(device) == 0:
        raise missing_device(device)
    if against_cpu and device == "cpu":
        raise ConfigError(
            "--against-cpu has nothing to compare with --device cpu; leave it out"
        )


def check_world_sizes(world_sizes: list[int], device: str) -> None:
    """Reject world sizes without a promise or without enough devices.

    Raises:
        ConfigError: naming the number and the fix.
    """
    for world_size in world_sizes:
        if world_size < 1 or world_size & (world_size - 1):
            raise ConfigError(
                f"--world-sizes {world_size} must be a power of two, where averaging is exact; "
                "set 2 or 4"
            )
        if device != "cpu" and world_size > device_count(device):
            raise ConfigError(
                f"--world-sizes {world_size} needs as many {device} devices, this machine has "
                f"{device_count(device)}; set fewer, or --device cpu"
            )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument(
        "--grad-accum", type=int, default=2, help="micro-batches a step"
    )
    parser.add_argument(
        "--models", nargs="+", default=PRESETS, help="presets of configs/model"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "npu"])
    # a wrong one is answered with all
    list_options: dict[str, Any] = {
        "nargs": "+",
        "metavar": "NAME",
    }
    parser.add_argument(
        "--strategies",
        choices=list(STRATEGIES),
        default=list(STRATEGIES),
        help=f"of {', '.join(STRATEGIES)}",
        **list_options,
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=["float32", "bfloat16"],
        default=["float32", "bfloat16"],
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=list(MODES),
        help="by default all that the device runs",
    )
    several = (
        "compare layouts, not strategies; pairs: each on the fewest ranks, on every number for "
        "two models only"
    )
    layouts = f"{several}; all, or of {'; '.join(LAYOUTS)}"
    parser.add_argument(
        "--layouts", choices=["all", "pairs", *LAYOUTS], help=layouts, **list_options
    )
    bugs = f"bugs to make and to find: all, or of {'; '.join(BUGS)}"
    parser.add_argument("--inject", choices=["all", *BUGS], help=bugs, **list_options)
    parser.add_argument(
        "--against-cpu", action="store_true", help="train every row on CPU ranks too"
    )
    args = parser.parse_args(argv)
    args.pairs = (
        bool(args.layouts) and "pairs" in args.layouts and "all" not in args.layouts
    )
    args.layouts = (
        list(LAYOUTS)
        if args.layouts and {"all", "pairs"} & {*args.layouts}
        else args.layouts
    )
    args.inject = list(BUGS) if args.inject and "all" in args.inject else args.inject
    if args.modes is None:
        args.modes = (
            ["deterministic", "default"]
            if float64_collectives(args.device)
            else ["portable"]
        )
    return args


def main() -> int:
    """Print the tables; 1 on any breach, 2 on a mistake in the arguments."""
    args = parse_arguments()
    console = Console(
        width=164 if args.against_cpu or args.layouts or args.inject else 144
    )
    breaches: list[str] = []
    try:
        check_device(args.device, args.against_cpu)
        if args.layouts or args.inject:
            return report(compare_all(args, console))
        check_world_sizes(args.world_sizes, args.device)
        with progress(count_units(args)):
            for model, dtype, mode in product(args.models, args.dtypes, args.modes):
                breaches += [
                    f"{model}: {breach}"
                    for breach in compare(args, model, mode, dtype, console)
                ]
    except ConfigError as error:
        print(f"parity: {error}", file=sys.stderr)
        return 2
    print(
        'Rows with "last bits !=" are not counted: '
        "their sums are added in another order (see --help)."
    )
    return report(breaches)


def report(breaches: list[str]) -> int:
    """Print the breaches; return the exit status."""
    for breach in breaches:
        print(f"BREACH: {breach}")
    print("parity: " + (f"{len(breaches)} breaches" if breaches else "no breach"))
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
