"""Differences between versions of FSDP2 and gloo, and the private attributes that answer them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .collectives import reduce_scatter


def gathering_stream(module: nn.Module) -> Any:
    """The stream on which FSDP2 reads a unit's shards for an all-gather in the forward; None where
    it is not found.

    PyTorch has no public way to it (private attribute, seen in torch 2.7 and 2.13). FSDP2 creates
    it in the root's first forward, and makes it wait for the compute stream in the root's forward
    only.
    """
    try:
        return module._get_fsdp_state()._comm_ctx.all_gather_copy_in_stream  # type: ignore[operator]
    except AttributeError:
        return None


def keep_gradient_dtype(module: nn.Module) -> None:
    """Let the backward of a micro-batch add the gradients of a tied weight in the dtype of its
    forward.

    From torch 2.15 on FSDP2 casts each of them to float32 before their sum if the gradients are not
    reduced in this backward; other strategies, and FSDP2 where it reduces them, cast the sum.
    Private API, tried with torch 2.15; older versions lack it and cast the sum.
    """
    for group in getattr(module._get_fsdp_state(), "_fsdp_param_groups", ()):  # type: ignore[operator]
        set_dtypes = getattr(group, "_set_unsharded_grad_dtypes", None)
        if set_dtypes is None:
            return

        def set_as_if_reduced(
            defer_upcast: bool,
            group: Any = group,
            set_dtypes: Callable[[bool], None] = set_dtypes,
        ) -> None:
            reduces, group.reduce_grads = group.reduce_grads, True
            try:
                set_dtypes(defer_upcast)
            finally:
                group.reduce_grads = reduces

        group._set_unsharded_grad_dtypes = set_as_if_reduced


def group_averages(group: dist.ProcessGroup) -> bool:
    """Whether a group's reduce-scatter with ``ReduceOp.AVG`` divides; gloo's silently sums in torch
    2.7."""
    if dist.get_backend(group) != "gloo":
        return True
    mean = torch.empty(1)
    reduce_scatter(mean, torch.ones(group.size()), op=dist.ReduceOp.AVG, group=group)
    return mean.item() == 1.0
