"""In which order PyTorch fires hooks: ``python docs/toys/synchronization/hook_order.py``, one
process, no ranks."""

import functools
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdptoys.toys.autograd import queue_callback


class Watch(torch.autograd.Function):
    """Identity that calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, call: Callable[[], None]) -> Tensor:
        """Pass the tensor."""
        ctx.call = call
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Pass the gradient."""
        ctx.call()
        return *grads, None


def watch(events: list[str], name: str, layer: nn.Linear) -> None:
    """Note every hook of a layer."""

    def note(event: str) -> Callable[..., None]:
        return lambda *_: events.append(f"{name}: {event}")

    def before_forward(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        events.append(f"{name}: forward pre-hook")
        return (Watch.apply(args[0], note("Function at the input")),)

    def after_forward(module: nn.Module, args: Any, output: Tensor) -> None:
        events.append(f"{name}: forward hook")
        output.register_hook(note("tensor hook of the output"))

    layer.register_forward_pre_hook(before_forward)
    layer.register_forward_hook(after_forward)
    layer.register_full_backward_pre_hook(note("full backward pre-hook"))
    layer.register_full_backward_hook(note("full backward hook"))
    for which, param in layer.named_parameters():

        def on_gradient(
            _: Tensor, hook: str, param: nn.Parameter = param, which: str = which
        ) -> None:
            events.append(
                f"{name}: {hook} of {which}, .grad "
                f"{'is None' if param.grad is None else 'is there'}"
            )

        param.register_hook(functools.partial(on_gradient, hook="tensor hook"))
        param.register_post_accumulate_grad_hook(
            functools.partial(on_gradient, hook="post-accumulate hook")
        )


def run(inputs_require_grad: bool = False, checkpointed: bool = False) -> list[str]:
    """Return the events of a forward and a backward of two layers."""
    events: list[str] = []
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    for name, layer in zip("AB", layers, strict=True):
        watch(events, name, layer)  # type: ignore[arg-type]
    hidden = torch.ones(2, 4, requires_grad=inputs_require_grad)
    for layer in layers:
        hidden = checkpoint(layer, hidden, use_reentrant=False) if checkpointed else layer(hidden)
    events.append("loss.backward()")
    hidden.register_hook(lambda _: queue_callback(lambda: events.append("callback of the engine")))
    hidden.sum().backward()
    events.append("backward returns")
    return events


def main() -> None:
    """Print three orders."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # as the events show
    print("\n".join(run()))
    plain = set(run())
    print("\nonly if the first input requires a gradient:")
    print("\n".join(event for event in run(inputs_require_grad=True) if event not in plain))
    events = run(checkpointed=True)
    print("\nafter loss.backward(), with both layers checkpointed:")
    print("\n".join(events[events.index("loss.backward()") + 1 :]))


if __name__ == "__main__":
    main()
