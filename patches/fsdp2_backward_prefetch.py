"""FSDP2: a forward that gradient checkpointing recomputes does not change the prefetch order.

Target: ``FSDPParamGroup.post_forward`` of
``torch.distributed.fsdp._fully_shard._fsdp_param_group``.

Why: the backward prefetches in the reverse order in which forwards ended. If a checkpointed block
contains units (``parallel.wrap=block_attn_mlp``), the backward runs their forwards once more. Up to
torch 2.9 units that have not begun their backward by then are added to the order a second time, and
freed: they are gathered again, and units that have ended it are prefetched and kept until its end.
Results stay right; the cost is communication and memory. With the patch, as with the upstream
fix, parameters gathered for the recomputation stay until their backward.

Not covered: compiled autograd, which FSDPToys does not use.

Upstream: https://github.com/pytorch/pytorch/pull/164009, in torch 2.10 and later.

Versions: the fix is absent from 2.7.1, 2.8.0, 2.9.0 and 2.9.1, and present in 2.10.0 to 2.15.0; run
with 2.7.1, and with 2.13.0 after removing the fix, on CPUs.
"""

import functools
from typing import Any

import torch
from torch import nn

from .patch import Patch, Undo, replace


def _install() -> Undo:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    original = FSDPParamGroup.post_forward

    @functools.wraps(original)
    def post_forward(self: Any, module: nn.Module, args: Any, output: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            return original(self, module, args, output)
        # Inside a backward, so this forward is a recomputation.
        self._training_state = TrainingState.IDLE
        return output

    return replace(FSDPParamGroup, "post_forward", post_forward)


PATCH = Patch(
    name="fsdp2_backward_prefetch",
    strategy="fsdp2",
    lowest=(2, 7),
    below=(2, 10),
    effect="recomputed forwards do not disturb the order of backward prefetching",
    beyond="not needed because torch {torch} keeps recomputed forwards out of the prefetch order "
    "itself",
    install=_install,
)
