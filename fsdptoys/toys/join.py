"""How DDP goes on where some ranks have run out of data: they keep step with the others, with gradients of zero."""

from typing import Any

from torch.distributed.algorithms.join import JoinHook

from .buckets import broadcast_together


class Shadow(JoinHook):
    """What a rank without data does while others have some, so that no collective waits for it."""

    def __init__(self, ddp: Any) -> None:
        self.ddp = ddp

    def main_hook(self) -> None:
        """One step of the others: the collectives of a forward and a backward, with gradients of zero."""
        ddp = self.ddp
        ddp.reducer.begin_forward()
        if ddp.will_sync_module_buffers():
            broadcast_together(ddp.own_buffers(), ddp.common_rank(False), ddp.process_group)
        ddp.require_forward_param_sync = ddp.any_rank_reduces(False)
        if ddp.require_forward_param_sync:
            ddp.reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the model of a rank that went on to the end."""
        self.ddp.send_states(self.ddp.common_rank(is_last_joiner), self.ddp.forward_sync_buffers)
