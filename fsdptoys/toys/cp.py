"""Context parallelism: each rank has a slice of every sequence; only attention needs the others'.

All else works token by token: each of N ranks takes 1/N of the tokens, and keeps 1/N of the
activations. A token's attention needs the keys and values of all tokens before it:

    Ulysses   q k v, (H heads, T/N tokens) ── all-to-all ──→ (H/N heads, T tokens)
              attend as on one rank
              result, (H heads, T/N tokens) ←── all-to-all ── (H/N heads, T tokens)

    ring      rank 0: q0 × kv0       rank 1: q1 × kv1       rank 2: q2 × kv2    K and V pass round,
              rank 0: q0 × kv2 ───→  rank 1: q1 × kv0 ───→  rank 2: q2 × kv1    queries stay

A rank of Ulysses sends (2·H + 2·G)·K·T/N·(N−1)/N numbers forward; N must divide H. One of the ring
sends 2·G·K·T/N·(N−1), while it computes. Blocks are merged by the log-sum-exp of their scores.
Under a causal mask all would wait for the last slice, which attends to everything. So the ring cuts
2·N chunks, and rank r has chunks r and 2·N−1−r: on every rank every turn is half a square.

Labels are shifted before the cut, the loss is a sum divided by the number of labels on all ranks,
and gradients are summed over all ranks. Left out: padding, windows, masks, fused kernels.
Sources: arXiv:2309.14509 (Ulysses), 2310.01889 (ring), 2311.09431 (stripes), Megatron-LM
Shapes: B batch, T own tokens, S keys of a block, H query heads, G key heads, R = H/G, K width.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

causal = partial(nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)


def own_positions(length: int, ranks: int, rank: int, balanced: bool) -> Tensor:
    """Return the positions of a rank's tokens: one slice, or two chunks to balance."""
    count = 2 * ranks if balanced else ranks
    if length % count:
        raise ValueError(f"sequences of {length} tokens cannot be cut into {count} equal chunks")
    chunks = torch.arange(length).chunk(count)
    return torch.cat([chunks[rank], chunks[count - 1 - rank]]) if balanced else chunks[rank]


class SwapDims(torch.autograd.Function):
    """Cut along one dim, send each rank a part, and join the received parts along another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cut: int, join: int, group: dist.ProcessGroup) -> Tensor:
        """Exchange the parts."""
        ctx.reverse = join, cut, group
        parts = torch.stack(tensor.chunk(group.size(), dim=cut))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(), dim=join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Exchange the gradients the other way."""
        return SwapDims.apply(grads[0], *ctx.reverse), None, None, None


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, group: Any, attend: Any = causal) -> Tensor:
    """Return attention of q (B, H, T, K) to k and v (B, G, T, K)."""
    if q.shape[1] % group.size():
        raise ValueError(f"{q.shape[1]} heads cannot be shared by {group.size()} ranks")
    # Copy key heads, so that each rank has those of its query heads; autograd sums the gradients.
    copies = math.lcm(k.shape[1], group.size()) // k.shape[1]
    own_heads = (q, *(x.repeat_interleave(copies, dim=1) for x in (k, v)))
    some_heads = (SwapDims.apply(x, 1, 2, group) for x in own_heads)
    return SwapDims.apply(attend(*some_heads), 2, 1, group)


def pass_on(tensor: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Begin to send a tensor to the next rank; the result waits for the previous rank's."""
    ranks = group.size()
    received = torch.empty_like(tensor)
    after, before = (dist.get_global_rank(group, (group.rank() + step) % ranks) for step in (1, -1))
    send = dist.P2POp(dist.isend, tensor, after, group)
    receive = dist.P2POp(dist.irecv, received, before, group)
    works = dist.batch_isend_irecv([send, receive]) if ranks > 1 else []

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return received if works else tensor

    return wait


def seen_parts(turn: int, rank: int, half: int, balanced: bool) -> tuple[slice, slice]:
    """Return which queries see keys of the rank ``turn`` places before, and which keys they see."""
    everything = slice(None)
    if turn == 0 or not balanced:
        return (everything, everything) if turn <= rank else (slice(0), slice(0))
    return (everything, slice(half)) if turn <= rank else (slice(half, None), everything)


def block_scores(q_BGRTK: Tensor, k_BGSK: Tensor, causal: bool) -> Tensor:
    """Return scaled scores_BGRTS, -inf where a query is before the key."""
    scores = torch.einsum("bgrtk,bgsk->bgrts", q_BGRTK, k_BGSK) / math.sqrt(k_BGSK.shape[-1])
    if causal:
        scores.masked_fill_(torch.ones_like(scores[0, 0, 0]).triu_(1).bool(), -math.inf)
    return scores


def attend_block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return attention to the keys of one block, and the log-sum-exp of its scores."""
    scores = block_scores(q, k, causal)
    lse = scores.logsumexp(-1, keepdim=True)
    return torch.einsum("bgrts,bgsk->bgrtk", (scores - lse).exp_(), v), lse


def block_gradients(
    q: Tensor, grad: Tensor, lse: Tensor, delta: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return gradients of q, and of k and v; ``delta`` is the sum of grad · result."""
    probs = (block_scores(q, k, causal) - lse).exp_()
    grad_v = torch.einsum("bgrts,bgrtk->bgsk", probs, grad)
    grad_scores = torch.einsum("bgrtk,bgsk->bgrts", grad, v).sub_(delta).mul_(probs)
    grad_scores.div_(math.sqrt(k.shape[-1]))
    grad_k = torch.einsum("bgrts,bgrtk->bgsk", grad_scores, q)
    return torch.einsum("bgrts,bgsk->bgrtk", grad_scores, k), torch.stack([grad_k, grad_v])


class RingAttention(torch.autograd.Function):
    """Causal attention to keys and values that pass round a group."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any, balanced: bool) -> Tensor:
        """Merge attention to one rank's keys after the other; the next travel meanwhile."""
        wide = torch.promote_types(q.dtype, torch.float32)
        q_BGRTK = q.unflatten(1, (k.shape[1], -1)).to(wide)
        kv = torch.stack([k, v])
        out = torch.zeros_like(q_BGRTK)
        lse = torch.full_like(q_BGRTK[..., :1], -math.inf)
        for turn in range(group.size()):
            arrival = pass_on(kv, group) if turn < group.size() - 1 else None
            queries, keys = seen_parts(turn, group.rank(), q.shape[2] // 2, balanced)
            k_block, v_block = kv[..., keys, :].to(wide)
            old_lse = lse[..., queries, :]
            block, block_lse = attend_block(q_BGRTK[..., queries, :], k_block, v_block, turn == 0)
            new_lse = torch.logaddexp(old_lse, block_lse)
            out[..., queries, :] *= (old_lse - new_lse).exp_()
            out[..., queries, :] += block.mul_((block_lse - new_lse).exp_())
            old_lse.copy_(new_lse)
            kv = kv if arrival is None else arrival()
        result = out.flatten(1, 2).to(q.dtype)
        ctx.settings = group, balanced
        ctx.save_for_backward(q, k, v, result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Pass K and V round, and behind each the sum of its gradients, until it is home."""
        q_BHTK, k_BGTK, v_BGTK, result, lse = ctx.saved_tensors
        group, balanced = ctx.settings
        kv = torch.stack([k_BGTK, v_BGTK])
        heads = (k_BGTK.shape[1], -1)
        q, out, grad = (x.unflatten(1, heads).to(lse.dtype) for x in (q_BHTK, result, grads[0]))
        grad_q = torch.zeros_like(q)
        delta = (grad * out).sum(-1, keepdim=True)
        sum_arrival: Callable[[], Tensor] = partial(torch.zeros_like, kv, dtype=lse.dtype)
        for turn in range(group.size()):
            arrival = pass_on(kv, group) if turn < group.size() - 1 else None
            queries, keys = seen_parts(turn, group.rank(), q.shape[3] // 2, balanced)
            at = (..., queries, slice(None))
            k, v = kv[..., keys, :].to(lse.dtype)
            add_q, add_kv = block_gradients(q[at], grad[at], lse[at], delta[at], k, v, turn == 0)
            grad_q[at] += add_q
            grad_kv = sum_arrival()
            grad_kv[..., keys, :] += add_kv
            sum_arrival = pass_on(grad_kv, group)
            kv = kv if arrival is None else arrival()
        return grad_q.flatten(1, 2).to(q_BHTK.dtype), *sum_arrival().to(k_BGTK.dtype), None, None


class ContextParallel(nn.Module):
    """A part of each sequence on every rank, by ``ring``, ``unbalanced_ring`` or ``ulysses``."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, kind: str = "ring") -> None:
        super().__init__()
        self.module = module
        self.cut_settings = (group.size(), group.rank(), kind == "ring")
        ring: Any = lambda q, k, v: RingAttention.apply(q, k, v, group, kind == "ring")  # noqa: E731
        self.attend = partial(ulysses_attention, group=group) if kind == "ulysses" else ring

    def cut(self, whole_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's tokens (or labels) and their positions."""
        own_T = own_positions(whole_BT.shape[1], *self.cut_settings)
        return whole_BT[:, own_T], own_T

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Call the module on this rank's part of whole sequences."""
        return self.module(*self.cut(tokens_BT), self.attend)

    def sum_gradients(self) -> None:
        """Sum the gradients over all ranks, one by one (:mod:`.ddp` sends buckets)."""
        for param in self.parameters():
            dist.all_reduce(param.grad)
