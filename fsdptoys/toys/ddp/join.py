"""Uneven inputs for DDP: ranks without data take part in the others' collectives, with gradients of zero."""

from typing import Any

from torch.distributed.algorithms.join import JoinHook

from ..buckets import broadcast_tensors


class Shadow(JoinHook):
    """The collectives of a rank that has run out of data.

    Args:
        ddp: a ``DistributedDataParallel``.
    """

    def __init__(self, ddp: Any) -> None:
        self.ddp = ddp

    def main_hook(self) -> None:
        """Take part in one forward and backward of the other ranks."""
        ddp = self.ddp
        ddp.reducer.begin_forward()
        if ddp.will_sync_module_buffers():
            broadcast_tensors(ddp.own_buffers(), ddp.common_rank(False), ddp.process_group)
        ddp.require_forward_param_sync = ddp.any_rank_reduces(False)
        if ddp.require_forward_param_sync:
            ddp.reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the model of a rank that had data to the end."""
        self.ddp.send_states(self.ddp.common_rank(is_last_joiner), self.ddp.forward_sync_buffers)
