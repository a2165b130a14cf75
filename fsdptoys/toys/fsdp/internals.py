"""What PyTorch has no public way to do, one function each; the only such lines of this package."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor


def register(module: nn.Module, name: str, param: nn.Parameter) -> None:
    """``setattr(module, name, param)`` without its checks, which cost more than all else that resharding does."""
    module._parameters[name] = param


def local_tensor(param: Tensor) -> Tensor:
    """A DTensor's own local tensor; ``to_local`` returns another one from torch 2.13 on, where it is a parameter."""
    assert isinstance(param, DTensor)
    return param._local_tensor


def set_local_tensor(param: Tensor, local: Tensor) -> None:
    """Let a DTensor keep its elements elsewhere, without becoming another object for the optimizer."""
    assert isinstance(param, DTensor)
    param._local_tensor = local


def accumulated(param: nn.Parameter) -> None:
    """Call the hooks of ``register_post_accumulate_grad_hook``: autograd does not know of sharded parameters."""
    for hook in list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(param)


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call once, when the backward that is running has reached all its leaves."""
    Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread: a forward is then a recomputation."""
    return torch._C._current_graph_task_id() != -1
