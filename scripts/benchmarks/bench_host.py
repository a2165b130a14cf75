"""Measure the host time of an operator: Python, dispatcher, autograd and hooks, with kernels too
small to matter.

    python scripts/benchmarks/bench_host.py --write benchmarks/host.md

The models are 64 wide and 4, 16 and 32 layers deep. The increase of a step's time per layer,
divided by the operators of a layer, is ``host_operator_seconds`` of a hardware profile for this
host, without the launch of a kernel on an accelerator, a few microseconds. The planner counts the
operators: two predictions of a host-bound step differ by their number times the difference of
``host_operator_seconds``. Rows other than ``single`` include the host time of collectives, which a
profile lists separately.
"""

import dataclasses
import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fsdptoys.device.profile import load_hardware
from fsdptoys.plan.predict import predict
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.tables import markdown_table
from scripts.common.configured import configured
from scripts.common.machine import machine
from scripts.common.page import command_line, page_parser, publish
from scripts.common.progress import progress, unit
from tests.harness.ranks import run_ranks

DEPTHS = (4, 16, 32)
WARMUP = 5
SLOW = 1e-3
"""Seconds an operator, of a host that bounds every step."""
NARROW = (
    "experiment=null model=llama_debug model.dim=64 model.n_heads=4 model.n_kv_heads=2 "
    "model.ffn_dim=64 model.vocab_size=128 data=synthetic train.batch_size=1 train.seq_len=16 "
    "optim.implementation=fused metrics.console=none launch.device=cpu"
)


def overrides_of(strategy: str, depth: int) -> list[str]:
    """Overrides of a row."""
    return f"{NARROW} model.n_layers={depth} parallel={strategy}".split()


def measure(overrides: list[str], steps: int) -> float:
    """Median seconds of a step of one rank."""
    trainer = Trainer(configured([*overrides, f"train.steps={steps}"]))
    trainer.train()
    return statistics.median(
        step.step_time_seconds for step in trainer.history[WARMUP:]
    )


def operators(overrides: list[str]) -> float:
    """Operators of a step on a CPU, by two predictions."""
    hardware = load_hardware("cpu")

    def predicted(seconds: float) -> float:
        quantity = dataclasses.replace(hardware.host_operator_seconds, value=seconds)
        slow = dataclasses.replace(hardware, host_operator_seconds=quantity)
        return predict(configured(overrides), slow, 1).time.step_seconds

    return (predicted(2 * SLOW) - predicted(SLOW)) / SLOW


def slope(values: dict[int, float]) -> float:
    """Growth of a quantity with each layer, from the least to the most layers."""
    least = min(values)
    most = max(values)
    return (values[most] - values[least]) / (most - least)


def main() -> None:
    """Print a table of the strategies."""
    parser = page_parser(__doc__)
    parser.add_argument(
        "--strategies", nargs="+", default=["single", "ddp", "fsdp1", "fsdp2"]
    )
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    depths = [f"{depth} layers, ms" for depth in DEPTHS]
    rows = [["strategy", *depths, "ms a layer", "operators a layer", "µs an operator"]]
    with progress(len(args.strategies)):
        for strategy in args.strategies:
            overrides = {depth: overrides_of(strategy, depth) for depth in DEPTHS}
            with unit(strategy) as progress_unit:
                times = {
                    depth: run_ranks(1, measure, overrides[depth], args.steps)[0]
                    for depth in DEPTHS
                }
                issued = {
                    depth: operators(overrides[depth])
                    for depth in (DEPTHS[0], DEPTHS[-1])
                }
                quotient = f"{1e6 * slope(times) / slope(issued):.1f}"
                progress_unit.note = f"{quotient} µs"
            steps = [f"{1e3 * seconds:.1f}" for seconds in times.values()]
            layer = [f"{1e3 * slope(times):.2f}", f"{slope(issued):.0f}", quotient]
            rows.append([strategy, *steps, *layer])
    publish(
        f"# Host time of an operator\n\n{command_line()}\n\nOne rank and one thread, "
        f"{machine('cpu')}. Medians of {args.steps - WARMUP} steps.\n\n"
        f"{markdown_table(rows, range(1, 7))}",
        args.write,
    )


if __name__ == "__main__":
    main()
