"""Rows of causal attention, and attention added up over blocks of keys."""

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fsdptoys.memory.activation_checkpointing import SAVED_OPERATORS
from fsdptoys.models.attention_rows import attend_rows
from fsdptoys.models.block_attention import (
    FLASH,
    PLAIN,
    BlockKernel,
    GradientsOfBlocks,
    RowsOfBlocks,
    blocks_between,
)
from fsdptoys.models.kernels import dense_mask, dense_rows
from fsdptoys.models.ops import Ops, choose_ops

T = 24
H = 6
G = 2
K = 4
CHUNKS = (None, 10, 4, 24)
PIECES = ((0, 6), (6, 6), (7, 11), (18, 6), (0, 24), (23, 1))
"""First row and number of rows."""


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, T, K) for heads in (H, G, G, H)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in shapes
    ]


def segments(chunk_len: int | None, documents: bool) -> Tensor:
    """A number for each token of two rows, equal where tokens may see each other."""
    ends_BT = (
        torch.tensor([[0] * 5 + [1] * 9 + [2] * 10, [0] * 20 + [1] * 4]) * documents
    )
    return ends_BT * T + torch.arange(T) // (chunk_len or T)


def causal(q: Tensor, k: Tensor, v: Tensor, segments_BT: Tensor) -> Tensor:
    """Attention by a softmax over all scores, masked."""
    k, v = (x.repeat_interleave(H // G, dim=1) for x in (k, v))
    mask = (segments_BT.unsqueeze(2) == segments_BT.unsqueeze(1)).tril().unsqueeze(1)
    scores = (q @ k.mT / K**0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def cases() -> Iterator[tuple[int | None, bool, int, int]]:
    for chunk_len in CHUNKS:
        for documents in (False, True):
            for start, rows in PIECES:
                yield chunk_len, documents, start, rows


@pytest.mark.parametrize(
    "kernels", [Ops(), choose_ops({"attention": "math"})], ids=["torch", "math"]
)
def test_rows_are_those_of_attention_over_the_full_sequence(kernels: Ops) -> None:
    """Oracle: a masked softmax over all scores in float64, values and gradients."""
    for chunk_len, documents, start, rows in cases():
        leaves = [x.requires_grad_() for x in inputs()]
        q, k, v, upstream = leaves
        piece = slice(start, start + rows)
        mask = (
            dense_rows(segments(chunk_len, True), start, start + rows, q.dtype)
            if documents
            else None
        )
        actual = attend_rows(q[:, :, piece], k, v, start, kernels, chunk_len, mask)
        expected = causal(q, k, v, segments(chunk_len, documents))[:, :, piece]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        actual_grads = torch.autograd.grad(actual, leaves[:3], upstream[:, :, piece])
        expected_grads = torch.autograd.grad(
            expected, leaves[:3], upstream[:, :, piece]
        )
        torch.testing.assert_close(actual_grads, expected_grads, rtol=0, atol=1e-12)


def test_rows_of_a_dense_mask_are_rows_of_the_full_mask() -> None:
    """Oracle: the full mask, cut."""
    full = dense_mask(segments(10, True), torch.float32)
    for start, rows in PIECES:
        stop = start + rows
        actual = dense_rows(segments(10, True), start, stop, torch.float32)
        assert torch.equal(actual, full[:, :, start:stop, :stop])


def test_rows_pass_through_selective_checkpointing() -> None:
    """Oracle: the same gradients without it; the dispatch mode rejects some forms of causal
    masks."""
    saved = [
        operator for operators in SAVED_OPERATORS.values() for operator in operators
    ]
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_rows(q[:, :, 7:18], k, v, 7, Ops(), 10)

    q, k, v, upstream = (x.requires_grad_() for x in inputs(torch.float32))
    plain = torch.autograd.grad(attend(q, k, v), (q, k, v), upstream[:, :, 7:18])
    out = checkpoint(attend, q, k, v, use_reentrant=False, context_fn=contexts)
    for actual, expected in zip(
        torch.autograd.grad(out, (q, k, v), upstream[:, :, 7:18]), plain, strict=True
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("kernel", [FLASH, PLAIN], ids=["flash", "plain"])
@pytest.mark.parametrize(
    ("dtype", "atol"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)],
)
def test_blocks_add_up_to_attention_over_all_keys(
    kernel: BlockKernel, dtype: torch.dtype, atol: float
) -> None:
    """Oracle: a masked softmax over all scores, values and gradients; sums are float32 or wider."""
    for chunk_len in CHUNKS:
        q, k, v, upstream = inputs(dtype)
        starts = (6, 12), [0, 18, 6, 12]  # keys in another order than positions
        keys = torch.cat([torch.arange(start, start + 6) for start in starts[1]])
        queries = slice(6, 18)
        blocks = blocks_between(*starts, 6, 6, chunk_len)
        rows = RowsOfBlocks(kernel, q[:, :, queries])
        for block in blocks:
            rows.add(block, k[:, :, keys], v[:, :, keys])
        out, lse = rows.result()
        gradients = GradientsOfBlocks(
            kernel, upstream[:, :, queries], q[:, :, queries], out, lse
        )
        grads = torch.zeros(2, *k.shape, dtype=lse.dtype)
        for block in blocks:
            gradients.add(block, k[:, :, keys], v[:, :, keys], *grads)
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        expected = causal(*wide, segments(chunk_len, False))[:, :, queries]
        by_q, by_k, by_v = torch.autograd.grad(
            expected, wide, upstream[:, :, queries].double()
        )
        assert out.dtype is dtype
        for actual, right in ((out, expected), (gradients.grad_q, by_q[:, :, queries])):
            torch.testing.assert_close(actual.double(), right, rtol=0, atol=atol)
        torch.testing.assert_close(
            grads.double(), torch.stack((by_k, by_v))[:, :, :, keys], rtol=0, atol=atol
        )
