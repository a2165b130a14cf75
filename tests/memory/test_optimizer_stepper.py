"""The hook before updates, wherever the updates happen."""

import hashlib
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn

from fsdptoys.memory import MemoryConfig
from fsdptoys.parallel import FSDP2Config
from fsdptoys.utils.dtensor import local_tensor
from tests.harness.offloaded_runs import OVERLAPPED, build_trainer, take_steps
from tests.harness.ranks import run_ranks
from tests.harness.tiny import make_config, tiny_model

STEPS = 2
IN_BACKWARD = MemoryConfig(optimizer_in_backward=True)
UNCLIPPED = {"max_grad_norm": None, "skip_nonfinite": False}
PATHS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "after the backward": (None, {}),
    "serial": ("serial", {}),
    "lazy": ("lazy", {}),
    "in threads": (OVERLAPPED, {"memory": MemoryConfig(cpu_offload=True)}),
    "in the backward": (None, {"memory": IN_BACKWARD, **UNCLIPPED}),
}


def gradients(how: str | None, options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Train, and return the gradients before updates, from the hook and after clipping."""
    config = make_config(
        FSDP2Config(),
        1,
        **{"steps": STEPS, "grad_accum": 1, "max_grad_norm": 0.01, **options},
        model=replace(tiny_model(), n_layers=2),
    )
    run = build_trainer(config, how)
    names = {param: name for name, param in run.strategy.trainable_parameters()}
    from_hook: list[str] = []
    after_clipping: list[str] = []

    def digest(param: nn.Parameter, grad: Tensor) -> str:
        content = local_tensor(grad).cpu().numpy().tobytes()
        return f"{names[param]} {hashlib.sha256(content).hexdigest()}"

    run.stepper.before_update(lambda *pair: from_hook.append(digest(*pair)))
    step = run.stepper.step

    def read_and_step(*args: Any) -> None:
        after_clipping.extend(
            digest(param, param.grad) for param in names if param.grad is not None
        )
        step(*args)

    run.stepper.step = read_and_step  # type: ignore[method-assign]
    take_steps(run, 1, STEPS)
    run.stepper.finish()
    assert len(from_hook) == STEPS * len(names)
    return sorted(from_hook), sorted(after_clipping)


@pytest.mark.parametrize("path", PATHS)
def test_hook_sees_each_gradient_as_it_is_applied(path: str) -> None:
    """Oracle: gradients after clipping of the ordinary step, bitwise."""
    how, options = PATHS[path]
    ordinary = {key: options[key] for key in options.keys() & UNCLIPPED.keys()}
    ((_, expected),) = run_ranks(1, gradients, None, ordinary)
    ((from_hook, _),) = run_ranks(1, gradients, how, options)
    assert from_hook == expected
