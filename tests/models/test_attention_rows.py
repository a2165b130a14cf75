"""Rows of causal attention under selective checkpointing. ``tests/parallel/test_context.py``
compares rows and blocks with attention over full sequences."""

import functools

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fsdptoys.memory.activation_checkpointing import SAVED_OPERATORS
from fsdptoys.models.attention_rows import attend_rows
from fsdptoys.models.ops import Ops


def test_rows_pass_through_selective_checkpointing() -> None:
    """Oracle: the same gradients without it; the dispatch mode rejects some forms of causal
    masks."""
    saved = [operator for operators in SAVED_OPERATORS.values() for operator in operators]
    contexts = functools.partial(create_selective_checkpoint_contexts, saved)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_rows(q[:, :, 7:18], k, v, 7, Ops(), 10)

    leaves = [torch.randn(2, heads, 24, 4, requires_grad=True) for heads in (6, 2, 2)]
    upstream = torch.randn(2, 6, 11, 4)
    plain = torch.autograd.grad(attend(*leaves), leaves, upstream)
    out = checkpoint(attend, *leaves, use_reentrant=False, context_fn=contexts)
    assert all(map(torch.equal, torch.autograd.grad(out, leaves, upstream), plain))
