"""Cost of sharing sequences and splitting experts: CPU time of a step, and bytes that a rank sends,
on four gloo ranks.

    python scripts/benchmarks/bench_layouts.py
    python scripts/benchmarks/bench_layouts.py --only experts --steps 5

- context: one Llama, the same global batch, ``mesh.cp_size`` 1, 2 and 4 in each form of
  ``parallel.context``, and the peak of a rank's tensors. Bytes are those of attention's exchanges
  and of all other collectives (FSDP2's).
- experts: one Qwen3 MoE, ``mesh.ep_size`` 1, 2 and 4, over growing numbers of tokens. Gathering
  experts costs the same for any number of tokens, exchanging tokens grows with them: with few
  tokens expert parallelism sends less. The bytes by formula, which are the planner's for an even
  load, stand beside the counted ones, and so does the number of tokens up to which they predict
  that it sends less.

CPU time is that of a rank's process (all ranks share the machine's cores), the median over steps;
bytes are counted by the collective trace of one step, as on a ring. Prints Markdown. Exits with
status 1 if a row's loss differs from the first row's by more than 1e-5, or if expert parallelism
sends more bytes where less are predicted.
"""

import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist

from fsdptoys.config.schema import Config
from fsdptoys.models import Qwen3MoEConfig
from fsdptoys.profiler.collectives import Call, CollectiveTrace
from fsdptoys.train.trainer import Trainer
from fsdptoys.utils.tables import markdown_table
from scripts.common.configured import configured
from scripts.common.machine import machine
from scripts.common.page import command_line, page_parser, publish
from scripts.common.progress import progress, unit
from tests.harness.ranks import run_ranks

RANKS = 4
LOSS_TOLERANCE = 1e-5
"""Relative, of every step, from the first row with the same batch."""
COMMON = (
    "parallel=fsdp2 data=synthetic optim.lr=1e-4 metrics.console=none launch.device=cpu "
    "train.max_grad_norm=1.0 model.max_seq_len=4096"
)
CONTEXT_MODEL = (
    "model=llama_debug model.dim=256 model.n_layers=4 model.n_heads=8 model.n_kv_heads=4 "
    "model.ffn_dim=688"
)
EXPERTS_MODEL = (
    "model=qwen3_moe_debug model.dim=128 model.n_layers=2 model.n_heads=4 model.head_dim=32 "
    "model.n_experts=16 model.top_k=2 model.expert_ffn_dim=128"
)
SEQ_LEN = 1024
"""Tokens of a sequence in the table of contexts."""
EXPERT_TOKENS = (64, 256, 1024, 2048)
"""Tokens of a rank and step in the table of experts."""


@dataclass
class Row:
    """Measured numbers of one layout."""

    losses: list[float]
    cpu_seconds: float
    """Median over the steps after the first two."""
    peak_gib: float
    """Most memory of rank 0's tensors at a time, in GiB; other ranks count none."""
    exchanged_bytes: float
    """Sent by a rank in a step along the axis of the table."""
    other_bytes: float
    """Sent by a rank in a step in all other collectives."""


def measure(configs: Sequence[Config], axis: str, titles: Sequence[str]) -> list[Row]:
    """Train every configuration for its steps on the ranks that this one belongs to."""
    rows = []
    for config, title in zip(configs, titles, strict=True):
        with unit(title, announce=dist.get_rank() == 0):
            rows.append(_measure_one(config, axis))
    return rows


def _measure_one(config: Config, axis: str) -> Row:
    trainer = Trainer(config)
    traced: list[Call] = []
    trace = CollectiveTrace(
        config.train.steps, trainer.strategy.model, {}, traced.extend
    )
    times: list[float] = []
    starts: list[float] = []
    trainer.around_step = trace.around
    trainer.on_phase = lambda step, phase: (
        starts.append(time.process_time()) if phase == "data" else None
    )
    trainer.train(on_step=lambda metrics: times.append(time.process_time()))
    # The last one was traced
    seconds = [end - start for start, end in zip(starts, times, strict=True)][2:-1]
    peaks = [
        step.memory_peak_gib
        for step in trainer.history
        if step.memory_peak_gib is not None
    ]
    own = [call.sends_bytes for call in traced if call.group == f"mesh_{axis}"]
    return Row(
        losses=[step.loss for step in trainer.history],
        cpu_seconds=statistics.median(seconds),
        peak_gib=max(peaks, default=0.0),
        exchanged_bytes=sum(own),
        other_bytes=sum(call.sends_bytes for call in traced) - sum(own),
    )


def context_rows(steps: int) -> dict[str, Config]:
    """Configurations of the table of contexts, all with the same global batch of four sequences."""
    # A micro-batch of cp sequences on RANKS / cp groups of ranks.
    common = f"{COMMON} {CONTEXT_MODEL} train.seq_len={SEQ_LEN} train.steps={steps}"
    overrides = {"cp 1": "train.batch_size=1"}
    for cp in (2, 4):
        for form in ("ulysses", "gathered", "ring"):
            layout = f"mesh.cp_size={cp} train.batch_size={cp} parallel.context={form}"
            overrides[f"cp {cp} {form}"] = layout
    return {
        name: configured(f"{common} {row}".split(), RANKS)
        for name, row in overrides.items()
    }


def expert_rows(tokens: int, steps: int) -> dict[str, Config]:
    """Configurations of the table of experts for this many tokens of a rank and step."""
    common = f"{COMMON} {EXPERTS_MODEL} train.seq_len={tokens} train.steps={steps}"
    return {
        f"ep {ep}": configured(f"{common} mesh.ep_size={ep}".split(), RANKS)
        for ep in (1, 2, 4)
    }


def expert_bytes(config: Config, ep: int, tokens: int) -> tuple[float, float]:
    """Bytes that a rank sends for its experts in a step, in float32: of exchanged rows, and of
    gathered experts.

    Rows go to the experts and back, and so do their gradients: 4 · N · K · D · (n − 1) / n elements
    for n = ep ranks, with an even load. The m = ranks / ep ranks that share experts gather them
    twice and reduce their gradients once: 3 · (3 · E · F · D / ep) · (m − 1) / m elements.
    """
    model = config.model
    assert isinstance(model, Qwen3MoEConfig)
    shards = RANKS // ep
    layers = model.n_layers // model.moe_every
    rows = 4 * tokens * model.top_k * model.dim * (ep - 1) / ep
    gathered = (
        3
        * 3
        * model.n_experts
        * model.expert_ffn_dim
        * model.dim
        / ep
        * (shards - 1)
        / shards
    )
    return 4.0 * layers * rows, 4.0 * layers * gathered


def break_even_tokens(config: Config, ep: int) -> float:
    """Tokens of a rank and step up to which ``ep`` sends less than gathering all experts, by
    ``expert_bytes``."""
    rows_of_a_token = expert_bytes(config, ep, 1)[0]
    saved = expert_bytes(config, 1, 0)[1] - expert_bytes(config, ep, 0)[1]
    return saved / rows_of_a_token


def bench_context(steps: int) -> tuple[str, list[str]]:
    """Return the table of contexts, and what fails."""
    configs = context_rows(steps)
    names = list(configs)
    rows: list[Row] = run_ranks(RANKS, measure, list(configs.values()), "cp", names)[0]
    first = rows[0]
    cells = [
        ["layout", "CPU s a step, of cp 1", "peak GiB, of cp 1", "attention sends MB",
         "others send MB"],
    ]  # fmt: skip
    for name, row in zip(names, rows, strict=True):
        numbers = (
            row.cpu_seconds / first.cpu_seconds,
            row.peak_gib / first.peak_gib,
            row.exchanged_bytes / 1e6,
            row.other_bytes / 1e6,
        )
        cells.append([name, *(f"{number:.2f}" for number in numbers)])
    text = (
        f"## Context\n\n{RANKS} ranks, 4 sequences of {SEQ_LEN} tokens a step, float32, {steps} "
        f"steps\n\n{markdown_table(cells, range(1, 5))}\n\ncp 1: {first.cpu_seconds:.3f} CPU s a "
        f"step, peak {first.peak_gib:.3f} GiB"
    )
    return text, other_losses(names, rows)


def bench_experts(steps: int) -> tuple[str, list[str]]:
    """Return the table of experts, and what fails."""
    cells = [
        ["tokens of a rank", "layout", "CPU s a step, of ep 1", "rows sent MB (even load)",
         "all sent MB", "of ep 1"],
    ]  # fmt: skip
    faults: list[str] = []
    for tokens in EXPERT_TOKENS:
        configs = expert_rows(tokens, steps)
        names = list(configs)
        rows: list[Row] = run_ranks(
            RANKS, measure, list(configs.values()), "ep", names
        )[0]
        whole = [row.exchanged_bytes + row.other_bytes for row in rows]
        for (name, config), row, sent in zip(configs.items(), rows, whole, strict=True):
            ep = config.mesh.ep_size
            even = expert_bytes(config, ep, tokens)[0]
            exchanged = (
                f"{row.exchanged_bytes / 1e6:.3f} ({even / 1e6:.3f})" if ep > 1 else ""
            )
            ratio = row.cpu_seconds / rows[0].cpu_seconds
            share = sent / whole[0]
            numbers = [f"{ratio:.2f}", exchanged, f"{sent / 1e6:.3f}", f"{share:.2f}"]
            cells.append([str(tokens), name, *numbers])
            if ep > 1 and tokens < 0.8 * break_even_tokens(config, ep) and share >= 1:
                faults.append(
                    f"{name} with {tokens} tokens sends {share:.2f} of the bytes of ep 1"
                )
        faults += [f"{tokens} tokens, {fault}" for fault in other_losses(names, rows)]
    config = configs["ep 1"]
    breaks = ", ".join(
        f"ep {ep}: {break_even_tokens(config, ep):,.0f}" for ep in (2, 4)
    )
    text = (
        f"## Experts\n\n{RANKS} ranks, 2 layers of 16 experts of 3 · 128 · 128 weights, 2 a "
        f"token, float32\n\n{markdown_table(cells, (0, 2, 3, 4, 5))}\n\n"
        f"Sends less than ep 1, by formula, up to these tokens of a rank and step: {breaks}"
    )
    return text, faults


def other_losses(names: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Rows with other losses than the first row's."""
    faults = []
    for name, row in zip(names, rows, strict=True):
        pairs = zip(row.losses, rows[0].losses, strict=True)
        worst = max(abs(loss - first) / abs(first) for loss, first in pairs)
        if not worst <= LOSS_TOLERANCE:
            faults.append(f"{name}: a loss differs by {worst:.1e}")
    return faults


TABLES = {"context": (7, bench_context), "experts": (12, bench_experts)}
"""Table → its number of rows, and its function."""


def main() -> int:
    """Print the tables; 1 if a row fails."""
    parser = page_parser(__doc__)
    parser.add_argument("--only", choices=list(TABLES))
    parser.add_argument(
        "--steps",
        type=int,
        default=6,
        help="at least 4: two to warm up, and the last is traced",
    )
    args = parser.parse_args()
    tables = [TABLES[args.only]] if args.only else list(TABLES.values())
    texts = ["# Layouts", command_line(), f"- {machine('cpu')}"]
    faults: list[str] = []
    with progress(sum(units for units, _ in tables)):
        for _, bench in tables:
            text, missed = bench(args.steps)
            texts.append(text)
            faults += missed
    publish(
        "\n\n".join([*texts, *(f"MISSED: {fault}" for fault in faults)]), args.write
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
