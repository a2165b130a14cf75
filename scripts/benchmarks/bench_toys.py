"""Benchmark the toys against PyTorch's own classes: the same GPT-2 on two ranks, step times and
overlap.

    python scripts/benchmarks/bench_toys.py  # CPU, gloo, 2 ranks; under five minutes on 2 cores
    python scripts/benchmarks/bench_toys.py --only fsdp --rounds 4

A step is forward, backward, clipping and AdamW, as in ``fsdptoys train``. The contestants of a
group live in the same ranks and take turns step by step, in an order that changes from turn to
turn, so that other load on the machine affects all alike; every round has new processes. A step's
time is that of the slower rank, a ratio the median of the ratios within a turn. All begin with the
same weights and see the same batches; losses must agree, or the benchmark stops.

- ddp: PyTorch's DistributedDataParallel, and the toy.
- zero: DDP with PyTorch's ZeroRedundancyOptimizer (ZeRO-1), and the toys ZeRO-1 and ZeRO-2. No
  target: PyTorch has no ZeRO-2, and gloo's reduce-scatter, on which ZeRO-2 depends, is an
  all-reduce of a copy.
- fsdp: PyTorch's FSDP2, the toy FSDP, and the toy ZeRO-3. FSDP2 is PyTorch's counterpart of ZeRO-3:
  both keep 1/N of parameters, gradients and states, gather a block before its forward and its
  backward, and reduce its gradients.

One more step of each is traced: the time with a collective in flight, and the share of it with an
operator of the rank at work. Memory is that of a contestant alone in new processes, as ``fsdptoys
train`` counts it on a CPU: blocks of PyTorch's allocator, without gloo's own buffers. The losses'
difference is the largest of a step, relative to the first contestant's. Prints Markdown. Exits with
status 1 if a target is missed.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from fsdptoys.config.schema import Config
from fsdptoys.device import AllocationCount, CountedBytes, Device
from fsdptoys.loss import build_loss
from fsdptoys.parallel import World, seeded
from scripts.benchmarks.toys_page import Contestant, Measured, render
from scripts.common.configured import configured
from scripts.common.machine import machine
from scripts.common.page import command_line, page_parser, publish
from scripts.common.progress import progress, unit
from tests.harness.ranks import run_ranks

RANKS = 2
LOSS_TOLERANCE = 1e-5
"""Relative, of every step."""
MAX_GRAD_NORM = 1.0
SETTINGS = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
STEP = "step of a contestant"


GROUPS = {
    "ddp": [Contestant("DDP", "ddp"), Contestant("toy_ddp", "toy_ddp", 1.05)],
    "zero": [
        Contestant("DDP, ZeroRedundancyOptimizer", "ddp", shards_states=True),
        Contestant("toy_zero1", "toy_zero1"),
        Contestant("toy_zero2", "toy_zero2"),
    ],
    "fsdp": [
        Contestant("FSDP2", "fsdp2"),
        Contestant("toy_fsdp", "toy_fsdp", 1.05),
        Contestant("toy_zero3", "toy_zero3", 1.25),
    ],
}
"""Group → contestants; the first is PyTorch's."""


class Training:
    """A contestant's model and optimizer on this rank.

    Args:
        contestant: owner of the model.
        config: validated.
    """

    def __init__(self, contestant: Contestant, config: Config) -> None:
        context = World(
            Device("cpu"), dist.get_rank(), dist.get_world_size(), config.mesh
        )
        with torch.device("meta"):
            model = config.model.build()
        self.strategy = config.parallel.build(context)
        self.strategy.shard(model, seeded(model.row_initializer(), 0))
        params = [param for _, param in self.strategy.named_parameters()]
        if contestant.shards_states:
            # its import is slow
            from torch.distributed.optim import (
                ZeroRedundancyOptimizer,
            )

            self.optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
                params, torch.optim.AdamW, **SETTINGS
            )
        else:
            self.optimizer = torch.optim.AdamW(params, **SETTINGS)  # type: ignore[arg-type]
        self.strategy.attach(self.optimizer)
        self.loss_fn = build_loss(chunk_loss=False)

    def take_step(self, tokens_BT: Tensor) -> Tensor:
        """Forward, backward, clipping and update; returns the loss of this rank's tokens."""
        strategy = self.strategy
        count = tokens_BT.numel() * dist.get_world_size()
        with strategy.microbatch(0, 1):
            loss: Tensor = strategy.model(
                tokens_BT, tokens_BT.roll(-1, 1), self.loss_fn
            )
            (loss * (strategy.gradient_divisor / count)).backward()
        strategy.clip_grad_norm(MAX_GRAD_NORM)
        self.optimizer.step()
        strategy.zero_grad(self.optimizer)
        return loss.detach() / tokens_BT.numel()


def compete(
    args: argparse.Namespace,
    group: list[Contestant],
    configs: list[Config],
    traces: bool,
) -> list[Measured]:
    """Run one round of a group on this rank."""
    trainings = [
        Training(contestant, config)
        for contestant, config in zip(group, configs, strict=True)
    ]
    measured = [Measured() for _ in group]
    generator = torch.Generator().manual_seed(dist.get_rank())
    for turn in range(args.warmup + args.turns + traces):
        tokens_BT = torch.randint(
            args.vocab_size, (args.batch_size, args.seq_len), generator=generator
        )
        first = turn % len(group)
        with unit(
            f"{group[-1].name} and others, turn {turn + 1}",
            announce=dist.get_rank() == 0,
        ):
            for number in [*range(first, len(group)), *range(first)]:
                training = trainings[number]
                result = measured[number]
                if turn == args.warmup + args.turns:
                    result.collective_seconds, result.hidden_seconds = trace(
                        training, tokens_BT
                    )
                    continue
                dist.barrier()
                cpu_seconds = time.process_time()
                seconds = time.perf_counter()
                loss = training.take_step(tokens_BT)
                if turn >= args.warmup:
                    result.seconds.append(time.perf_counter() - seconds)
                    result.cpu_seconds.append(time.process_time() - cpu_seconds)
                result.losses.append(loss.item())
    return measured


def count_bytes(
    args: argparse.Namespace, contestant: Contestant, config: Config
) -> CountedBytes:
    """Count this rank's allocations in a step after the first two, which make the states and the
    buffers."""
    training = Training(contestant, config)
    tokens_BT = torch.randint(args.vocab_size, (args.batch_size, args.seq_len))
    for _ in range(2):
        training.take_step(tokens_BT)
    count = AllocationCount({})
    training.take_step(tokens_BT)
    return count.finish({})


def trace(training: Training, tokens_BT: Tensor) -> tuple[float, float]:
    """Return the seconds of a step with a collective in flight, and those of them in which the rank
    computed."""
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(STEP):
        training.take_step(tokens_BT)
    events = profiler.events() or []
    (thread,) = (event.thread for event in events if event.name == STEP)
    intervals = [
        (event, (event.time_range.start, event.time_range.end)) for event in events
    ]
    sending = [
        interval
        for event, interval in intervals
        if event.name.startswith(("gloo:", "nccl:"))
    ]
    issuing = [
        interval for event, interval in intervals if event.name.startswith("c10d::")
    ]
    # Operators of the model and the optimizer; gloo's threads and the calls of collectives copy
    # too.
    computing = [
        (start, end)
        for event, (start, end) in intervals
        if event.name.startswith("aten::") and event.thread == thread
        if not any(first <= start and end <= last for first, last in issuing)
    ]
    return covered(sending) / 1e6, (
        covered(sending) + covered(computing) - covered([*sending, *computing])
    ) / 1e6


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total = 0.0
    reached = -float("inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def over_ranks(per_rank: Sequence[list[Measured]]) -> list[Measured]:
    """Combine ranks: seconds of the slowest, sum of CPU seconds, mean losses and trace times of
    each contestant."""
    return [
        Measured(
            seconds=[
                max(turn)
                for turn in zip(*(rank.seconds for rank in ranks), strict=True)
            ],
            cpu_seconds=[
                sum(turn)
                for turn in zip(*(rank.cpu_seconds for rank in ranks), strict=True)
            ],
            losses=[
                statistics.fmean(turn)
                for turn in zip(*(rank.losses for rank in ranks), strict=True)
            ],
            collective_seconds=statistics.fmean(
                rank.collective_seconds for rank in ranks
            ),
            hidden_seconds=statistics.fmean(rank.hidden_seconds for rank in ranks),
        )
        for ranks in zip(*per_rank, strict=True)
    ]


def check_losses(group: list[Contestant], measured: list[Measured]) -> None:
    """Compare the losses of all contestants.

    Raises:
        SystemExit: naming the first that differs.
    """
    for contestant, result in zip(group, measured, strict=True):
        for step, (loss, expected) in enumerate(
            zip(result.losses, measured[0].losses, strict=True), 1
        ):
            if not abs(loss - expected) <= LOSS_TOLERANCE * abs(expected):
                raise SystemExit(
                    f"not the same work: step {step} of {contestant.name} has the loss "
                    f"{loss:.7f}, of {group[0].name} {expected:.7f}"
                )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = page_parser(__doc__)
    names = list(GROUPS)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, help="groups"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5, help="a round")
    parser.add_argument(
        "--warmup",
        type=int,
        default=2,
        help="first turns of a round that are not timed",
    )
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--batch-size", type=int, default=1, help="of a rank")
    parser.add_argument("--seq-len", type=int, default=128)
    return parser.parse_args(argv)


def compose(args: argparse.Namespace, contestant: Contestant) -> Config:
    """Return a contestant's configuration."""
    line = (
        f"experiment=null model=gpt2 parallel={contestant.strategy} model.dim={args.dim} "
        f"model.n_layers={args.layers} model.n_heads={args.heads} "
        f"model.vocab_size={args.vocab_size} train.seq_len={args.seq_len}"
    )
    return configured(line.split(), RANKS)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return 0 if every target is met."""
    args = parse_arguments(argv)
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = compose(args, GROUPS["ddp"][0]).model.build()
    parameters = sum(param.numel() for param in model.parameters())
    texts = [
        "# The toys next to PyTorch's own",
        command_line(argv),
        f"{machine('cpu')}.",
        f"A GPT-2 of {parameters / 1e6:.1f}M parameters (dim {args.dim}, {args.layers} layers, "
        f"vocabulary {args.vocab_size}, tied), {args.batch_size} × {args.seq_len} tokens a rank "
        f"and step, float32, {RANKS} ranks of one thread; {args.rounds} rounds of {args.turns} "
        "turns.",
    ]
    # A turn is a unit, the traces of the last round are another, and so is a contestant's memory.
    contestants = sum(len(GROUPS[name]) for name in args.only)
    with progress(
        len(args.only) * (args.rounds * (args.warmup + args.turns) + 1) + contestants
    ):
        for name in args.only:
            group = GROUPS[name]
            configs = [compose(args, contestant) for contestant in group]
            rounds = []
            for number in range(args.rounds):
                traced = number == args.rounds - 1
                measured = run_ranks(RANKS, compete, args, group, configs, traced)
                rounds.append(over_ranks(measured))
                check_losses(group, rounds[-1])
            for contestant, config, last in zip(
                group, configs, rounds[-1], strict=True
            ):
                with unit(f"memory of {contestant.name}"):
                    counts = run_ranks(RANKS, count_bytes, args, contestant, config)
                last.kept_bytes = max(count.end_bytes for count in counts)
                last.peak_bytes = max(count.peak_bytes for count in counts)
            texts += [f"## {name}", render(group, rounds)]
    publish("\n\n".join(texts), args.write)
    return 1 if any("- MISSED" in text for text in texts) else 0


if __name__ == "__main__":
    sys.exit(main())
