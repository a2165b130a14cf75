"""Count the bytes that a rank of the toys keeps: GPT-2 XL over eight ranks, without memory or other
ranks.

    python scripts/toys/toys_memory.py                            # about two minutes of CPU time
    python scripts/toys/toys_memory.py --model gpt2 --world-size 64 --ranks 0 63

The trainer's strategies shard the model and take one step, with fake tensors and collectives that
do nothing. The storages of parameters, gradients and optimizer states must have the bytes of the
formulas, padding included; otherwise the status is 1. ``tests/toys/test_memory.py`` counts on real
ranks.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.config.compose import compose_config
from fsdptoys.device import Device
from fsdptoys.loss import build_loss
from fsdptoys.parallel import World
from fsdptoys.plan.trace.fake_tensors import fake_tensors
from fsdptoys.utils.storages import storage_bytes
from scripts.common.progress import progress, unit
from tests.harness.ranks import run_ranks

STRATEGIES = ("toy_zero2", "toy_zero3", "toy_fsdp")
"""``toy_ddp`` and ``toy_zero1`` keep whole gradients, which ``tests/toys/test_memory.py``
counts."""
FLOAT_BYTES = 4
MIB = 2**20

Held = tuple[int, int, int]
"""Bytes of parameters, gradients and AdamW's states."""


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List all states except the step counts."""
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if value.ndim
    ]


def expected(
    kind: str, shapes: Sequence[torch.Size], ranks: int, rank: int, bucket_bytes: int
) -> Held:
    """Compute P, or P/N with its padding, from shapes alone.

    Args:
        kind: ddp, zero1, zero2, zero3 or fsdp.
        shapes: of all parameters, in the order of the forward.
        ranks: number of ranks.
        rank: rank to count.
        bucket_bytes: bytes that fill a bucket of ZeRO-1 or ZeRO-2.
    """
    whole = sum(shape.numel() for shape in shapes)
    if kind == "ddp":
        elements = (whole, whole, 2 * whole)
    elif kind in ("zero1", "zero2"):
        # Every bucket is padded to N slices of one length; the padding of the last ones has no
        # states.
        slices = [
            (length, -(-length // ranks))
            for length in _bucket_lengths(shapes, bucket_bytes)
        ]
        padded = sum(slice_len for _, slice_len in slices)
        owned = sum(
            min(max(length - rank * slice_len, 0), slice_len)
            for length, slice_len in slices
        )
        elements = (ranks * padded, whole if kind == "zero1" else padded, 2 * owned)
    elif kind == "zero3":
        # Whole tensors: the largest first, each to the rank with the least.
        rank_elements = [0] * ranks
        for numel in sorted((shape.numel() for shape in shapes), reverse=True):
            rank_elements[rank_elements.index(min(rank_elements))] += numel
        elements = (rank_elements[rank], rank_elements[rank], 2 * rank_elements[rank])
    else:
        # Rows are cut as torch.chunk cuts them; every rank has room for the first chunk, and states
        # for its own.
        rows = [
            (shape[0], -(-shape[0] // ranks), shape.numel() // shape[0])
            for shape in shapes
        ]
        padded = sum(chunk * width for _, chunk, width in rows)
        owned = sum(
            min(max(count - rank * chunk, 0), chunk) * width
            for count, chunk, width in rows
        )
        elements = (padded, padded, 2 * owned)
    parameters, gradients, states = (FLOAT_BYTES * count for count in elements)
    return parameters, gradients, states


def _bucket_lengths(shapes: Sequence[torch.Size], bucket_bytes: int) -> list[int]:
    """Return the elements of each bucket, filled from the last parameter on."""
    lengths = [0]
    for shape in reversed(shapes):
        if lengths[-1] * FLOAT_BYTES >= bucket_bytes:
            lengths.append(0)
        lengths[-1] += shape.numel()
    return lengths


def compare(
    overrides: list[str], strategy: str, ranks: int, rank: int
) -> tuple[Held, Held]:
    """Return the bytes of one rank, counted and by formula; replaces the process group."""
    # Registers the backend; PyTorch's own test helper, private in torch 2.7 to 2.13.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    config = compose_config([*overrides, f"parallel={strategy}"])
    config.validate(ranks, "cpu")
    with fake_tensors("cpu"):
        with torch.device("meta"):
            model = config.model.build()
        shapes = [param.shape for param in model.parameters()]
        parallel = config.parallel.build(World(Device("cpu"), rank, ranks, config.mesh))
        parallel.shard(model, lambda param, name: None)
        params = [param for _, param in parallel.named_parameters()]
        optimizer = torch.optim.AdamW(params)
        tokens_BT = torch.zeros(1, 8, dtype=torch.long)
        with parallel.microbatch(0, 1):
            parallel.model(
                tokens_BT, tokens_BT, build_loss(chunk_loss=False)
            ).backward()
        gradients = storage_bytes(
            param.grad for param in params if param.grad is not None
        )
        optimizer.step()
        rank_bytes = (
            storage_bytes(params),
            gradients,
            storage_bytes(state_tensors(optimizer)),
        )
    bucket_bytes = getattr(config.parallel, "bucket_cap_mb", 0) * MIB
    return rank_bytes, expected(
        strategy.removeprefix("toy_"), shapes, ranks, rank, bucket_bytes
    )


def main(argv: list[str] | None = None) -> int:
    """Print the table; return 1 if a number differs from its formula."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt2_xl", help="preset of configs/model")
    parser.add_argument("--layers", type=int, help="instead of the preset's")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        help="of which to count; the first and the last by default",
    )
    parser.add_argument(
        "--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES
    )
    args = parser.parse_args(argv)
    overrides = ["experiment=null", f"model={args.model}"]
    overrides += [f"model.n_layers={args.layers}"] if args.layers else []
    print(
        "| strategy | rank | parameters | gradients | states of AdamW | formulas "
        "|\n|---|---:|---:|---:|---:|---|"
    )
    differs = False
    ranks = args.ranks or [0, args.world_size - 1]
    with progress(len(args.strategies) * len(ranks)):
        for strategy in args.strategies:
            for rank in ranks:
                with unit(f"{strategy}, rank {rank}"):
                    ((counted, formula),) = run_ranks(
                        1, compare, overrides, strategy, args.world_size, rank
                    )
                differs |= counted != formula
                cells = [f"{count:,}" for count in counted]
                verdict = (
                    "equal"
                    if counted == formula
                    else f"DIFFERS: {', '.join(f'{count:,}' for count in formula)}"
                )
                print(
                    f"| {strategy} | {rank} | {' | '.join(cells)} | {verdict} |",
                    flush=True,
                )
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
