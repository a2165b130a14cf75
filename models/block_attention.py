"""Attention over one block of keys, and the merge of blocks by their log-sum-exp
(arXiv:2112.05682).

Softmax over all keys is a weighted mean of softmaxes over blocks of keys: a block's weight is the
sum of its exponentials, whose logarithm a flash kernel returns. So a row's attention can be
computed block by block, as keys arrive or where a causal mask makes a block a triangle or a
rectangle, without any mask in memory. The backward of a block needs the result and the log-sum-exp
of the full row only.

PyTorch has no public function that returns the log-sum-exp with a backward of its own, so
``FLASH`` calls the operators behind ``scaled_dot_product_attention``: private API, tried on CPUs
with torch 2.7.1, 2.11, 2.13 and 2.15; those of CUDA have the schema of these versions and were not
run. ``PLAIN`` writes the scores of a block, on every device.

Shapes: B batch, P queries, S keys of a block, H query heads, G key/value heads, K width of a head.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention import attention
from .kernels import IMPLEMENTATIONS
from .linear import goes_through_float32
from .ops import Ops

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
SHARES_HEADS = TORCH >= (2, 11)
"""Whether flash operators take shared key/value heads; on a CPU those of torch 2.7 crash."""


class Block(NamedTuple):
    """Rows that see a run of keys: all of them, or those up to their own place in it."""

    rows: slice
    keys: slice
    causal: bool


class BlockKernel(NamedTuple):
    """Attention over a block of keys."""

    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]
    """``forward(q_BHPK, k_BGSK, v_BGSK, causal)``: result and log-sum-exp of the scores (B, H,
    P)."""
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool],
        tuple[Tensor, Tensor, Tensor],
    ]
    """``backward(grad_BHPK, q_BHPK, k_BGSK, v_BGSK, out_BHPK, lse_BHP, causal)``: gradients of
    queries, keys and values by this block, from result and log-sum-exp over all blocks."""


def _flash_forward(
    q_BHPK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    k_BGSK, v_BGSK = _own_heads(q_BHPK, k_BGSK), _own_heads(q_BHPK, v_BGSK)
    out_BHPK, lse_BHP, *_ = _operator(q_BHPK)(q_BHPK, k_BGSK, v_BGSK, 0.0, causal)
    return out_BHPK, lse_BHP


def _flash_backward(
    grad_BHPK: Tensor,
    q_BHPK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    out_BHPK: Tensor,
    lse_BHP: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    k_BHSK = _own_heads(q_BHPK, k_BGSK)
    v_BHSK = _own_heads(q_BHPK, v_BGSK)
    operator = _operator(q_BHPK, "_backward")
    tensors = grad_BHPK, q_BHPK, k_BHSK, v_BHSK, out_BHPK, lse_BHP
    if q_BHPK.device.type == "cpu":
        grad_q, grad_k, grad_v = operator(*tensors, 0.0, causal)
    else:
        # Random states matter with dropout only.
        state = torch.empty(2, dtype=torch.uint64, device=q_BHPK.device)
        lengths = None, None, q_BHPK.shape[2], k_BHSK.shape[2]
        grad_q, grad_k, grad_v = operator(
            *tensors, *lengths, 0.0, causal, state, state[:0]
        )
    return grad_q, _shared_heads(grad_k, k_BGSK), _shared_heads(grad_v, v_BGSK)


def _plain_forward(
    q_BHPK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    scores, _, _, v = _scores(q_BHPK, k_BGSK, v_BGSK, causal)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ v
    return out.flatten(1, 2), lse.flatten(1, 2)


def _plain_backward(
    grad_BHPK: Tensor,
    q_BHPK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    out_BHPK: Tensor,
    lse_BHP: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    scores, q, k, v = _scores(q_BHPK, k_BGSK, v_BGSK, causal)
    share = (k_BGSK.shape[1], -1)
    dtype = scores.dtype
    weights = (scores - lse_BHP.unflatten(1, share).unsqueeze(-1)).exp()
    grad, out = (x.to(dtype).unflatten(1, share) for x in (grad_BHPK, out_BHPK))
    grad_v = (weights.mT @ grad).sum(2)
    grad_scores = (
        weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * _scale(q_BHPK)
    )
    return (grad_scores @ k).flatten(1, 2), (grad_scores.mT @ q).sum(2), grad_v


def _scores(
    q_BHPK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores (B, G, H/G, P, S), and queries, keys and values in their dtype that broadcast with
    them."""
    wide = torch.promote_types(q_BHPK.dtype, torch.float32)
    q = q_BHPK.to(wide).unflatten(1, (k_BGSK.shape[1], -1))
    k, v = (x.to(wide).unsqueeze(2) for x in (k_BGSK, v_BGSK))
    scores = q @ k.mT * _scale(q_BHPK)
    if causal:
        hidden_PS = torch.ones(
            scores.shape[-2:], dtype=torch.bool, device=scores.device
        ).triu_(1)
        scores = scores.masked_fill_(hidden_PS, -torch.inf)
    return scores, q, k, v


FLASH = BlockKernel(_flash_forward, _flash_backward)
"""PyTorch's flash kernels: memory linear in P and S."""
PLAIN = BlockKernel(_plain_forward, _plain_backward)
"""Matmuls and a softmax in float32 or wider, which write (B, H, P, S) scores."""


def flash_blocks(ops: Ops, q_BHPK: Tensor) -> BlockKernel | None:
    """The flash kernel where it takes the queries, and is among the backends that attention chooses
    from, else None."""
    chosen = ops.attention in (attention, IMPLEMENTATIONS["attention"]["flash"])
    return FLASH if chosen and _takes(q_BHPK) else None


def _takes(q_BHPK: Tensor) -> bool:
    device = q_BHPK.device
    width = q_BHPK.shape[-1]
    if device.type == "cpu":
        return hasattr(
            torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward"
        )
    if (
        device.type != "cuda"
        or torch.version.hip
        or q_BHPK.dtype not in (torch.bfloat16, torch.float16)
    ):
        return False
    # The kernel takes other widths padded only.
    return (
        width % 8 == 0
        and width <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _operator(q_BHPK: Tensor, suffix: str = "") -> Any:
    device_suffix = "_for_cpu" if q_BHPK.device.type == "cpu" else ""
    return getattr(
        torch.ops.aten, f"_scaled_dot_product_flash_attention{device_suffix}{suffix}"
    )


def _own_heads(q_BHPK: Tensor, x_BGSK: Tensor) -> Tensor:
    share = q_BHPK.shape[1] // x_BGSK.shape[1]
    return (
        x_BGSK if SHARES_HEADS or share == 1 else x_BGSK.repeat_interleave(share, dim=1)
    )


def _shared_heads(grad_BHSK: Tensor, x_BGSK: Tensor) -> Tensor:
    if grad_BHSK.shape[1] == x_BGSK.shape[1]:
        return grad_BHSK
    return grad_BHSK.unflatten(1, (x_BGSK.shape[1], -1)).sum(2)


def _scale(q_BHPK: Tensor) -> float:
    return 1 / math.sqrt(q_BHPK.shape[-1])


class RowsOfBlocks:
    """Attention of some queries, added up over blocks of keys in float32, or float64 for float64.

    A CPU without matmuls of a 16-bit dtype computes in float32.
    """

    def __init__(self, kernel: BlockKernel, q_BHPK: Tensor) -> None:
        self._kernel = kernel
        self._dtype = q_BHPK.dtype
        self._through = torch.float32 if goes_through_float32(q_BHPK) else q_BHPK.dtype
        self._q = q_BHPK.to(self._through)
        wide = torch.promote_types(q_BHPK.dtype, torch.float32)
        # Tokens outermost, so that heads are joined without a copy.
        self._out = torch.zeros_like(
            q_BHPK.transpose(1, 2), dtype=wide, memory_format=torch.contiguous_format
        )
        self._out = self._out.transpose(1, 2)
        self._lse = torch.full(
            q_BHPK.shape[:3], -torch.inf, dtype=wide, device=q_BHPK.device
        )

    def add(self, block: Block, k_BGSK: Tensor, v_BGSK: Tensor) -> None:
        """Let rows see more keys: ``block.keys`` of these."""
        k, v = (x[:, :, block.keys].to(self._through) for x in (k_BGSK, v_BGSK))
        out, lse = self._kernel.forward(self._q[:, :, block.rows], k, v, block.causal)
        out_before = self._out[:, :, block.rows]
        lse_before = self._lse[:, :, block.rows]
        lse_after = torch.logaddexp(lse_before, lse)
        out_before.mul_((lse_before - lse_after).exp().unsqueeze(-1))
        out_before.add_(out * (lse - lse_after).exp().unsqueeze(-1))
        lse_before.copy_(lse_after)

    def result(self) -> tuple[Tensor, Tensor]:
        """Attention over all keys added, in the dtype of the queries, and the log-sum-exp."""
        return self._out.to(self._dtype), self._lse


class GradientsOfBlocks:
    """Gradients of attention that was added up over blocks, in float32 or wider."""

    def __init__(
        self,
        kernel: BlockKernel,
        grad_BHPK: Tensor,
        q_BHPK: Tensor,
        out_BHPK: Tensor,
        lse: Tensor,
    ) -> None:
        self._kernel = kernel
        self._lse = lse
        self._through = torch.float32 if goes_through_float32(q_BHPK) else q_BHPK.dtype
        self._grad, self._q, self._out = (
            x.to(self._through) for x in (grad_BHPK, q_BHPK, out_BHPK)
        )
        self.grad_q = torch.zeros(q_BHPK.shape, dtype=lse.dtype, device=q_BHPK.device)

    def add(
        self,
        block: Block,
        k_BGSK: Tensor,
        v_BGSK: Tensor,
        grad_k: Tensor,
        grad_v: Tensor,
    ) -> None:
        """Add the gradients by a block to ``grad_q``, ``grad_k`` and ``grad_v``."""
        rows, keys, causal = block
        q = self._q[:, :, rows]
        k = k_BGSK[:, :, keys].to(self._through)
        v = v_BGSK[:, :, keys].to(self._through)
        grad, out, lse = (
            x[:, :, rows].contiguous() for x in (self._grad, self._out, self._lse)
        )
        by_q, by_k, by_v = self._kernel.backward(grad, q, k, v, out, lse, causal)
        self.grad_q[:, :, rows] += by_q
        grad_k[:, :, keys] += by_k
        grad_v[:, :, keys] += by_v


def blocks_between(
    query_starts: Sequence[int],
    key_starts: Sequence[int],
    queries: int,
    keys: int,
    chunk_len: int | None = None,
) -> list[Block]:
    """Blocks of causal attention between pieces of a sequence, which are equal to, or disjoint
    from, one another.

    Args:
        query_starts: positions of the first token of each piece of queries, which are kept in this
            order.
        key_starts: likewise for keys; one piece of them may be the full sequence.
        queries: tokens of each piece of queries.
        keys: tokens of each piece of keys.
        chunk_len: length of the chunks within which tokens attend; None for the full sequence.
    """
    blocks = []
    for index, query_start in enumerate(query_starts):
        start = query_start
        stop = query_start + queries
        while start < stop:
            # Rows of one chunk.
            first = 0 if chunk_len is None else start - start % chunk_len
            end = stop if chunk_len is None else min(first + chunk_len, stop)
            rows = slice(
                index * queries + start - query_start,
                index * queries + end - query_start,
            )
            for key_index, key_start in enumerate(key_starts):
                shift = key_index * keys - key_start
                low = max(first, key_start)
                high = min(start, key_start + keys)
                if low < high:
                    blocks.append(Block(rows, slice(low + shift, high + shift), False))
                if key_start <= start < key_start + keys:
                    blocks.append(Block(rows, slice(start + shift, end + shift), True))
            start = end
    return blocks
