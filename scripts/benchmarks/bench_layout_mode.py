"""Measure the price of ``train.deterministic``: CPU time of a step in one process under each mode,
and with slices.

    python scripts/benchmarks/bench_layout_mode.py
    python scripts/benchmarks/bench_layout_mode.py --grains 4 --dtype bfloat16

The model is a Llama of width 512 with 4 blocks and 4,096 classes, on 4 sequences of 512 tokens. The
modes take turns, each in a process of its own; a mode's time is the median over its rounds of the
median over steps, without the first. CPU time rather than elapsed time, so that other load on the
machine matters less. Prints Markdown.
"""

import itertools
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.tables import markdown_table
from scripts.common.configured import configured
from scripts.common.machine import machine
from scripts.common.page import page_parser, publish
from scripts.common.progress import progress, unit
from tests.harness.ranks import run_ranks

MODES = {
    "false": ["train.deterministic=false"],
    "true": ["train.deterministic=true"],
    "layout": ["train.deterministic=layout"],
    "layout train.slices=2": ["train.deterministic=layout", "train.slices=2"],
    "layout train.slices=4": ["train.deterministic=layout", "train.slices=4"],
}
"""Row → overrides."""
SETTINGS = (
    "model=llama_debug model.dim=512 model.n_layers=4 model.n_heads=8 model.n_kv_heads=4 "
    "model.ffn_dim=1536 model.vocab_size=4096 model.max_seq_len=512 parallel=single "
    "data=synthetic train.batch_size=4 train.seq_len=512 metrics.console=none launch.device=cpu"
)


def measure(overrides: list[str]) -> float:
    """Median CPU time of a step, in seconds."""
    marks: list[float] = []
    Trainer(configured(overrides)).train(
        on_step=lambda _: marks.append(time.process_time())
    )
    return statistics.median(
        after - before for before, after in itertools.pairwise(marks)
    )


def main() -> None:
    """Print a table of the modes."""
    parser = page_parser(__doc__)
    dtypes = ["float32", "bfloat16"]
    parser.add_argument(
        "--dtype", choices=dtypes, default="float32", help="of the computation"
    )
    parser.add_argument(
        "--grains", type=int, default=8, help="train.grains under layout"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    shared = (
        f"{SETTINGS} train.steps={args.steps} parallel.param_dtype={args.dtype}".split()
    )
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    with progress(args.rounds * len(MODES)):
        for _ in range(args.rounds):
            for mode in MODES:
                own = [*shared, *MODES[mode]]
                if mode.startswith("layout"):
                    own.append(f"train.grains={args.grains}")
                with unit(mode) as progress_unit:
                    seconds[mode] += run_ranks(1, measure, own)
                    progress_unit.note = f"{seconds[mode][-1]:.2f} s"
    medians = {mode: statistics.median(times) for mode, times in seconds.items()}
    rows = [["`train.deterministic`", "CPU time of a step", "ratio"]]
    for mode, median in medians.items():
        rows.append(
            [f"`{mode}`", f"{median:.2f} s", f"{median / medians['false']:.2f}"]
        )
    publish(
        f"One process, {args.dtype}, {args.grains} grains, {args.rounds} rounds of {args.steps} "
        f"steps, {machine('cpu')}\n\n{markdown_table(rows)}",
        args.write,
    )


if __name__ == "__main__":
    main()
