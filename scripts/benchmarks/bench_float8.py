"""Does training in float8 learn as training in bfloat16 does? Losses of a small Llama over text,
emulated on a CPU.

    python scripts/benchmarks/bench_float8.py                     # about ten minutes on one core
    python scripts/benchmarks/bench_float8.py --steps 40 --seeds 1

Every dtype trains the same model on the same bytes in the same order, once per seed. torchao rounds
the operands to float8 and multiplies them in float32 here, so this shows the effect on the loss and
nothing about speed. The spread over seeds is the scale for differences between dtypes. Prints
Markdown.
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.tables import markdown_table
from scripts.common.configured import configured
from scripts.common.machine import machine
from scripts.common.page import command_line, page_parser, publish
from scripts.common.progress import progress, unit
from tests.harness.ranks import run_ranks

FORMATS = ("none", "tensorwise", "rowwise")


def losses(overrides: list[str]) -> tuple[list[float], float]:
    """Loss of each step, and the last held-out loss."""
    trainer = Trainer(configured(overrides))
    trainer.train()
    held_out = trainer.history[-1].eval_loss
    assert held_out is not None
    return [step.loss for step in trainer.history], held_out


def main() -> None:
    """Train them all, one after the other."""
    parser = page_parser(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    common = [
        "experiment=cpu_text", "model.dim=128", "model.n_layers=4", "model.n_heads=4",
        "model.n_kv_heads=2", "model.ffn_dim=384", "parallel=single",
        "parallel.param_dtype=bfloat16",
        "train.batch_size=4", "train.seq_len=128", "train.max_seconds=null",
        f"train.steps={args.steps}", f"train.eval_every={args.steps}", "train.eval_batches=32",
        "metrics.console=none",
    ]  # fmt: skip
    losses_by_format: dict[str, list[tuple[list[float], float]]] = {}
    with progress(len(FORMATS) * args.seeds):
        for kind in FORMATS:
            losses_by_format[kind] = []
            for seed in range(args.seeds):
                overrides = [*common, f"train.float8={kind}", f"train.seed={seed}"]
                with unit(f"{kind}, seed {seed}") as progress_unit:
                    losses_by_format[kind] += run_ranks(1, losses, overrides)
                    progress_unit.note = f"held out {losses_by_format[kind][-1][1]:.4f}"
    window = max(1, args.steps // 10)
    marks = [args.steps * tenth // 10 for tenth in (1, 2, 4, 6, 8, 10)]
    rows = [["train.float8", *map(str, marks), "held out", "deviation"]]
    for kind, runs in losses_by_format.items():
        cells = [
            statistics.mean(
                statistics.mean(run[mark - window : mark]) for run, _ in runs
            )
            for mark in marks
        ]
        ends = [held_out for _, held_out in runs]
        spread = statistics.stdev(ends) if len(ends) > 1 else 0.0
        rows.append(
            [kind, *(f"{cell:.4f}" for cell in [*cells, statistics.mean(ends), spread])]
        )
    publish(
        f"# Float8\n\n{command_line()}\n\n{machine('cpu', ['torchao'])}\n\n"
        f"Settings: `{' '.join(common)}`; one thread; means over {args.seeds} seeds.\n\n"
        f"Mean loss of the {window} steps up to that one, in nats a byte; standard deviation "
        f"over the seeds at the end:\n\n{markdown_table(rows, range(1, 9))}",
        args.write,
    )


if __name__ == "__main__":
    main()
