"""Runs with an optimizer of a user's own, which creates its states in its first step."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from fsdptoys.checkpoint import CheckpointConfig, Checkpointer
from fsdptoys.errors import ConfigError
from fsdptoys.optim import OptimConfig, WeightDecayOn
from fsdptoys.parallel import (
    FSDP1Config,
    FSDP2Config,
    SingleConfig,
    ToyZero1Config,
    ToyZero3Config,
)
from tests.checkpoint.saves import save
from tests.harness.ranks import run_ranks
from tests.harness.resumed_runs import (
    SMALL,
    Row,
    check_resumed_run,
    refused,
    with_checkpoints,
)
from tests.harness.tiny import make_config


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (arXiv:2302.06675), and a count of its steps."""

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr})

    def states(self, param: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's states, which begin with its first step."""
        state: dict[str, Any] = self.state[param]
        if not state:
            state["momentum"] = torch.zeros_like(param)
            state["step"] = torch.zeros(())
        return state

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.numel():
                    state = self.states(param)
                    state["step"] += 1
                    update = state["momentum"].lerp(param.grad, 0.1).sign_()
                    param.add_(update, alpha=-group["lr"] / float(state["step"]))
                    state["momentum"].lerp_(param.grad, 0.01)


class Hidden(Lion):
    """Keeps its states where nothing looks for them."""

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, lr)
        self.hidden: dict[torch.Tensor, dict[str, Any]] = {}

    def states(self, param: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's states."""
        zeros = {"momentum": torch.zeros_like(param), "step": torch.zeros(())}
        return self.hidden.setdefault(param, zeros)


class Counting(Lion):
    """Counts its steps in an int, as older optimizers do."""

    def states(self, param: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's states."""
        if not self.state[param]:
            super().states(param)["step"] = 0
        return super().states(param)


class Momentless(Lion):
    """Keeps the count alone."""

    def states(self, param: torch.Tensor) -> dict[str, Any]:
        """Return the count, and a momentum of zeros."""
        count = self.state[param].setdefault("step", torch.zeros(()))
        return {"momentum": torch.zeros_like(param), "step": count}


KINDS = {kind.__name__: kind for kind in (Lion, Hidden, Counting, Momentless)}


@dataclass
class OwnConfig(OptimConfig):
    """Settings of an optimizer of a user's own."""

    name: ClassVar[str] = "adamw"  # of the group that a saved configuration names
    fused_takes_shards: ClassVar[bool] = False
    state_widths: ClassVar[tuple[int, ...]] = (4,)
    kind: str = "Lion"

    def build(self, params: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Construct the optimizer."""
        return KINDS[self.kind](params, self.lr)


@dataclass
class MomentlessConfig(OwnConfig):
    """Settings of an optimizer without a state an element."""

    state_widths: ClassVar[tuple[int, ...]] = ()
    kind: str = "Momentless"


LION = OwnConfig(lr=1e-2, weight_decay_on=WeightDecayOn.all)
OPTIONS = {"optim": LION, "deterministic": True}
ROWS = {
    "single": Row(SingleConfig(), 1, options=OPTIONS),
    "fsdp1": Row(FSDP1Config(), options=OPTIONS),
    "fsdp1, flat": Row(FSDP1Config(use_orig_params=False), options=OPTIONS),
    "fsdp2": Row(FSDP2Config(), options=OPTIONS),
    "fsdp2, a count alone": Row(
        FSDP2Config(), options=OPTIONS | {"optim": MomentlessConfig(lr=1e-2)}
    ),
    "toy_zero1": Row(ToyZero1Config(), options=OPTIONS),
    "toy_zero3": Row(ToyZero3Config(), options=OPTIONS),
}


@pytest.mark.parametrize("label", ROWS)
def test_states_that_an_optimizer_creates_in_its_first_step_are_resumed(
    label: str, tmp_path: Path
) -> None:
    """Oracle: the uninterrupted run's losses and parameters, bitwise."""
    check_resumed_run(label, ROWS[label], tmp_path)


def test_states_that_no_checkpoint_holds_are_refused(tmp_path: Path) -> None:
    """Oracle: the messages, for states outside the optimizer's ``state`` and for other than
    tensors; without them a resumed run would start from none."""

    def body() -> list[str]:
        runs = [
            make_config(SingleConfig(), 1, **SMALL | {"optim": optim})
            for optim in (OwnConfig(kind="Hidden"), OwnConfig(kind="Counting"))
        ]
        return refused(
            *(
                with_checkpoints(run, tmp_path / str(number))
                for number, run in enumerate(runs)
            )
        )

    hidden, counting = run_ranks(1, body)[0]
    assert hidden == (
        "optim=adamw has states by its state_widths, but its optimizer shows none to save; keep "
        "them in its attribute state, by parameter"
    )
    assert counting == (
        "the optimizer keeps step of embed_tokens.weight as int, which no checkpoint holds; "
        "keep it as a tensor of one number"
    )


def test_states_that_a_run_leaves_out_are_refused_but_for_weights_alone(
    tmp_path: Path,
) -> None:
    """Oracle: the message; the saved value."""
    config = CheckpointConfig(every=1, resume="auto")
    assert save(Checkpointer(config, str(tmp_path)), 1, 3.0)
    checkpoint = Checkpointer(config, str(tmp_path)).resume()
    assert checkpoint is not None
    tensors = {"model.a": torch.zeros(3, 5)}
    with pytest.raises(ConfigError) as refusal:
        checkpoint.load(tensors)
    assert str(refusal.value) == (
        f"{tmp_path}/step-00000001 holds optim.a.step, a state that this run's optimizer does not "
        "have; resume with the optimizer and the settings that it was saved with"
    )
    assert not tensors["model.a"].any()
    checkpoint.load(tensors, weights_only=True)
    assert (tensors["model.a"] == 3).all()
