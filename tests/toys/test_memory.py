"""Bytes held by a rank of each toy, and the peak of a step compared with PyTorch's FSDP2."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.toys import fsdp
from fsdptoys.toys.ddp import DDP
from scripts.toys import toys_memory
from scripts.toys.record_toys import LiveBytes
from scripts.toys.toys_memory import (
    FLOAT_BYTES,
    MIB,
    Held,
    expected,
    state_tensors,
    storage_bytes,
)
from tests.harness.ranks import run_ranks
from tests.toys.fsdp_models import NATIVE, Case, Model, backward, batches, build
from tests.toys.zero_runs import SMALL_BUCKETS, make

KINDS = ("ddp", "zero1", "zero2", "zero3", "fsdp")
PEAK_TOLERANCE = 1.05


def held_bytes(kind: str) -> Held:
    """Bytes of this rank's parameters, gradients and states after the second backward; the first
    one learns orders."""
    torch.manual_seed(0)
    plain = build(fsdp, Case()) if kind == "fsdp" else Model()
    model, params, attach = make(kind, plain, gradient_as_bucket_view=True)
    if kind == "ddp":
        model = DDP(plain, bucket_cap_mb=SMALL_BUCKETS, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(params, lr=0.01)
    attach(optimizer)
    for step in range(2):
        if step:
            optimizer.step()
            optimizer.zero_grad()
        (tokens_BT,) = batches(1)
        nn.functional.cross_entropy(
            model(tokens_BT).flatten(0, 1), tokens_BT.flatten()
        ).backward()
    pieces = [*plain.parameters(), *params]
    gradients = storage_bytes(param.grad for param in pieces if param.grad is not None)
    return storage_bytes(pieces), gradients, storage_bytes(state_tensors(optimizer))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.extended)])
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_memory_is_divided_by_the_ranks_plus_padding(
    kind: str, ranks: int
) -> None:
    """Oracle: P and P/N with the padding of each layout, computed from the shapes, to the byte;
    sums over ranks."""
    shapes = [param.shape for param in Model().parameters()]
    whole = FLOAT_BYTES * sum(shape.numel() for shape in shapes)
    per_rank = run_ranks(ranks, held_bytes, kind)
    assert per_rank == [
        expected(kind, shapes, ranks, rank, int(SMALL_BUCKETS * MIB))
        for rank in range(ranks)
    ]
    # Every state is kept exactly once.
    assert sum(states for _, _, states in per_rank) == 2 * whole * (
        ranks if kind == "ddp" else 1
    )
    # Padding is less than a row a parameter and rank, or an element a bucket and rank.
    if kind == "fsdp":
        rows = FLOAT_BYTES * sum(shape.numel() // shape[0] for shape in shapes)
        assert all(
            0 <= ranks * params - whole <= (ranks - 1) * rows
            for params, _, _ in per_rank
        )
    if kind == "zero2":
        assert all(
            0 <= params - whole <= FLOAT_BYTES * (ranks - 1) * len(shapes)
            for params, _, _ in per_rank
        )


@pytest.mark.skipif(
    TORCH < (2, 8), reason="collectives of torch 2.7 do not take fake tensors"
)
def test_memory_of_a_gpt2_xl_rank_matches_the_formulas(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the same formulas, and a few shapes by hand; two of the blocks, with fake tensors and
    collectives."""
    assert toys_memory.main(["--layers", "2", "--ranks", "7"]) == 0
    rows = [
        [cell.strip() for cell in line.split("|")]
        for line in capsys.readouterr().out.splitlines()[2:]
    ]
    assert [row[1] for row in rows] == list(toys_memory.STRATEGIES) and all(
        row[6] == "equal" for row in rows
    )
    # A block has 12·D·D weights, 9·D biases and 4·D of norms; the vocabulary is 50257 rows, so
    # seven rows are padding.
    elements = (50257 + 1024) * 1600 + 2 * (12 * 1600**2 + 13 * 1600) + 2 * 1600
    assert int(rows[2][3].replace(",", "")) == 4 * (elements + 7 * 1600) // 8


def step_peak(library: Any) -> tuple[int, int]:
    """Bytes held by this rank before a step, and the step's peak above them, without gloo's
    memory."""
    with LiveBytes().watch() as live:
        model = build(library, Case(model={"dim": 64, "blocks": 6}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        peaks = []
        for _ in range(20):
            kept_bytes = sum(size for _, size in live.changes)
            live.changes.clear()
            live.changes.append((0.0, kept_bytes))
            backward(model, batches(1)[0])
            optimizer.step()
            optimizer.zero_grad()
            sizes = itertools.accumulate(size for _, size in live.changes)
            peaks.append(max(sizes) - kept_bytes)
    before = storage_bytes(model.parameters()) + storage_bytes(state_tensors(optimizer))
    # A thread of gloo's may free its last reference late.
    return before, min(peaks[2:])


@pytest.mark.extended
def test_peak_memory_of_a_step_is_within_5_percent_of_pytorch() -> None:
    """Oracle: PyTorch's FSDP2 on the same model, by the storages that operators make."""
    for (before, most), (native_before, native_most) in run_ranks(
        2, lambda: (step_peak(fsdp), step_peak(NATIVE))
    ):
        assert before == native_before
        assert 0 < most <= native_most * PEAK_TOLERANCE
