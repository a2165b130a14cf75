"""Units inside a checkpointed block are gathered once in the backward, in order, each while the one before computes.

Under torch 2.7 to 2.9 this shows the patch mending PyTorch itself; under later versions, PyTorch without its own fix.
"""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils.checkpoint import checkpoint

from fsdptoys.patches import PATCHES
from scripts.ranks import run_ranks

PATCH = PATCHES["fsdp2_backward_prefetch"]
WIDTH = 6


class Block(nn.Module):
    """Weights of its own, and two units inside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map [batch, WIDTH] to the same shape."""
        hidden_states = hidden_states + self.attn(self.norm(hidden_states)).relu()
        return hidden_states + self.mlp(hidden_states).relu()


def make_model() -> nn.Module:
    """Two checkpointed blocks, ``0`` and ``1``, and a head, ``2``."""
    torch.manual_seed(0)
    blocks = [Block(), Block()]
    head = nn.Linear(WIDTH, 3)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        for unit in (block.attn, block.mlp, block):
            fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    fully_shard(head, mesh=mesh, reshard_after_forward=True)
    return fully_shard(nn.Sequential(*blocks, head), mesh=mesh)


def post_forward_until_2_9(self: Any, module: nn.Module, args: Any, output: Any) -> Any:
    """The hook of torch 2.9 after a unit's forward, without its logging."""
    self.reshard()
    self._record_post_forward()
    self._training_state = TrainingState.IDLE
    return output


def backward_gathers(without_fix: bool, patched: bool) -> tuple[list[str], list[list[float]]]:
    """Names of the units gathered in the backward, in order, and the gradients."""
    if without_fix:
        FSDPParamGroup.post_forward = post_forward_until_2_9
    if patched:
        PATCH.install()
    gathered: list[str] = []
    unshard = FSDPParamGroup.unshard

    def noted_unshard(self: Any, *args: Any, **kwargs: Any) -> None:
        before = self._all_gather_result
        unshard(self, *args, **kwargs)
        if before is None and self._all_gather_result is not None:
            gathered.append(self._module_fqn)

    FSDPParamGroup.unshard = noted_unshard
    model = make_model()
    torch.manual_seed(dist.get_rank())
    loss = model(torch.randn(4, WIDTH)).square().sum()
    assert gathered == ["0", "0.attn", "0.mlp", "1", "1.attn", "1.mlp", "2"]
    gathered.clear()
    loss.backward()
    return gathered, [param.grad.to_local().flatten().tolist() for param in model.parameters()]


IN_ORDER = ["2", "1", "1.mlp", "1.attn", "0", "0.mlp", "0.attn"]
DISTURBED = ["2", "1", "1.mlp", "1.attn", "1.mlp", "1.attn", "2", "0", "0.mlp", "0.attn", "0.mlp", "0.attn", "1.mlp"]
"""Every inner unit twice, and ``2`` and ``1.mlp`` once more after their backward was over."""


@pytest.mark.parametrize("patched", [False, True], ids=["stock", "patched"])
@pytest.mark.parametrize("without_fix", [False, True], ids=["installed", "without_fix"])
def test_recomputation_keeps_the_prefetch_order_if_patched_or_fixed_upstream(without_fix: bool, patched: bool) -> None:
    """Oracle: the reverse of the forward's order; the patch's range names the versions without the fix."""
    lacks_fix = without_fix or PATCH.reason_against(torch.__version__) is None
    expected = DISTURBED if lacks_fix and not patched else IN_ORDER
    changed, stock = run_ranks(2, backward_gathers, without_fix, patched), run_ranks(2, backward_gathers, False, False)
    for rank in range(2):
        gathered, grads = changed[rank]
        assert gathered == expected
        assert grads and grads == stock[rank][1]
