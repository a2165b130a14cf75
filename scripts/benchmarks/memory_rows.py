"""Rows of the memory benchmark: their switches, published figures and targets."""

import argparse
from dataclasses import dataclass, field

from fsdptoys.device import available_cores, device_count

GC = "memory.gradient_checkpointing=full"
CHUNK = "memory.chunk_loss=true"
OO = "memory.optimizer_offload=true"
CO = "memory.cpu_offload=true"
PARTS = "parallel.wrap=block_attn_mlp"

OPTIMIZER_OFFLOAD_TARGET = 1.10
"""Time of the quickest optimizer offload over that of the same row without."""
CPU_OFFLOAD_TARGET = 1.5
NO_COST = 1.02
"""Ratio of times that counts as equal, given the noise of two runs."""


@dataclass(frozen=True)
class Row:
    """One combination of switches."""

    overrides: tuple[str, ...]
    base: str | None = None
    """The row that its time is divided by."""
    published_end_gib: dict[str, float] = field(default_factory=dict)
    """Allocated after a step in the classic table, by strategy."""
    published_reserved_gib: dict[str, float] = field(default_factory=dict)
    only: str | None = None
    """The one strategy that has it."""
    target: float | None = None
    """Most that its time may be over that of ``base``."""


def published(fsdp1: float, fsdp2: float) -> dict[str, float]:
    """One cell of the classic table for both strategies."""
    return {"fsdp1": fsdp1, "fsdp2": fsdp2}


ROWS = {
    "plain": Row((), None, published(9.72, 9.72), published(44.92, 40.78)),
    "gc": Row((GC,), None, published(9.72, 9.72), published(21.90, 18.17)),
    "gc chunk": Row(
        (GC, CHUNK),
        "gc",
        published(9.48, 9.48),
        published(21.59, 17.78),
        target=NO_COST,
    ),
    "gc chunk oo": Row(
        (GC, CHUNK, OO),
        "gc chunk",
        published(3.20, 3.20),
        published(20.20, 13.62),
        target=OPTIMIZER_OFFLOAD_TARGET,
    ),
    "gc chunk co": Row(
        (GC, CHUNK, CO),
        "gc chunk",
        published(0.06, 0.06),
        published(12.31, 8.44),
        target=CPU_OFFLOAD_TARGET,
    ),
    "parts gc chunk co": Row(
        (PARTS, GC, CHUNK, CO), "parts gc", published(0.06, 0.06), published(9.36, 7.64)
    ),
    "parts": Row((PARTS,), None, published(9.72, 9.72), published(42.80, 40.36)),
    "parts gc": Row((PARTS, GC), None, published(9.72, 9.72), published(19.85, 17.45)),
    # Not in the classic table.
    "gc chunk oo serial": Row(
        (GC, CHUNK, OO, "memory.offload_schedule=serial"), "gc chunk"
    ),
    "gc chunk oo pipelined": Row(
        (GC, CHUNK, OO, "memory.offload_schedule=pipelined"),
        "gc chunk",
        published(3.20, 3.20),
        published(20.20, 13.62),
    ),
    "gc chunk oo half": Row((GC, CHUNK, OO, "memory.offload_fraction=0.5"), "gc chunk"),
    "gc chunk co overlapped": Row(
        (GC, CHUNK, CO, "memory.cpu_offload_executor=overlapped"),
        "gc chunk",
        only="fsdp2",
        target=CPU_OFFLOAD_TARGET,
    ),
    "gc chunk ao": Row((GC, CHUNK, "memory.activation_offload=true"), "gc chunk"),
    "selective chunk": Row(
        ("memory.gradient_checkpointing=selective", CHUNK), "gc chunk"
    ),
}
"""Name → switches; the first eight are those of the classic table, in its order."""
CLASSIC = ("llama2_7b", 8, 4096)
"""Model, ranks and sequence of the classic table, beside which alone its figures stand."""


@dataclass(frozen=True)
class Result:
    """Measurements of one row, or the reason why there are none."""

    seconds: float | None = None
    end_gib: float | None = None
    peak_gib: float | None = None
    reserved_gib: float | None = None
    failure: str | None = None
    refused: bool = False
    """Whether the configuration says that this cannot be."""


def row_cores(args: argparse.Namespace) -> int:
    """CPU cores of the one rank: its share of this machine, by devices, or on a CPU by ranks."""
    ranks = (
        args.world_size if args.device == "cpu" else max(1, device_count(args.device))
    )
    return args.cores or max(1, available_cores() // ranks)
