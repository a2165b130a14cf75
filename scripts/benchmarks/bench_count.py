"""Cost of counting a CPU's memory: every other step of one run is counted, and the two kinds are
compared.

    python scripts/benchmarks/bench_count.py
    python scripts/benchmarks/bench_count.py --steps 80 model=gpt2_debug parallel=ddp

Prints the median time of counted and of other steps on rank 0, the median over pairs of neighbors
of their ratio, the time that a count takes between the steps, and the number of steps after which
the next one is due (``fsdptoys.train.step_memory``).
"""

import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fsdptoys.train.step_memory import COST
from fsdptoys.train.trainer import Trainer
from scripts.common.configured import configured
from scripts.common.page import page_parser, publish
from scripts.common.progress import progress, unit
from tests.harness.ranks import run_ranks

WARMUP = 4


def train(
    overrides: list[str], ranks: int, steps: int
) -> tuple[list[float], list[float]]:
    """Train, counting every even step; return the seconds of each step and of each count."""
    trainer = Trainer(
        configured([*overrides, f"train.steps={steps}", "train.eval_every=0"], ranks)
    )
    costs: list[float] = []
    counter = trainer.memory
    enabled = trainer.memory.enabled
    seconds: list[float] = []

    def is_due() -> bool:
        return enabled and len(seconds) % 2 == 1

    counter.is_due = is_due  # type: ignore[method-assign]

    def on_step(step: object) -> None:
        seconds.append(trainer.history[-1].step_time_seconds)
        if len(seconds) % 2 == 0:
            costs.append(counter.cost_seconds)

    trainer.train(on_step)
    return seconds[WARMUP:], costs[WARMUP // 2 :]


def main() -> None:
    """Print the comparison."""
    parser = page_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    args, overrides = parser.parse_known_args()
    overrides = ["model=llama_debug", "data=synthetic", "train.seq_len=512", *overrides]
    with progress(1), unit(f"{args.steps} steps"):
        seconds, costs = run_ranks(
            args.ranks, train, overrides, args.ranks, args.steps
        )[0]
    others = seconds[::2]
    counted = seconds[1::2]
    pairs = [one / other for one, other in zip(counted, others, strict=True)]
    step = statistics.median(others)
    cost = statistics.median(costs)
    publish(
        f"other steps {step * 1e3:.1f} ms, counted steps {statistics.median(counted) * 1e3:.1f} "
        f"ms\nratio {statistics.median(pairs):.3f} (median of {len(pairs)} pairs)\n"
        f"a count takes {cost * 1e3:.1f} ms between the steps: due again after "
        f"{cost / COST / step:.0f} steps",
        args.write,
    )


if __name__ == "__main__":
    main()
