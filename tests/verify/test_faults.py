"""Faults injected into the sharded side of a verification: each is named with its first tensor and
step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fsdptoys.parallel import fsdp2
from fsdptoys.parallel.ddp import DDP
from fsdptoys.train.gradient_scale import GradientScale, StepScale
from fsdptoys.verify.judge import Outcome, Verdict
from fsdptoys.verify.progress import Progress
from fsdptoys.verify.rows import ROWS
from fsdptoys.verify.verify import Runner, usual_overrides
from scripts.equality.parity_bugs import BUGS
from tests.harness.levels import by_level


def verdict_with(
    patch: Callable[[], Any], model: str, row_name: str, folder: Path
) -> Verdict:
    """Train a row with a fault, against a plain loop without it."""
    # interleaved stages need two blocks on each of two ranks
    layers = ["model.n_layers=4"] if row_name == "pp-interleaved" else []
    overrides = usual_overrides([f"model={model}", "train.steps=2", *layers], "cpu")
    runner = Runner(overrides, "cpu", folder, Progress(1))
    row = ROWS[row_name]
    runner.reference(row, runner.configure(row.overrides, row.ranks)[1])
    with patch():
        return runner.run(row)


def drop_reduction() -> Any:
    """No rank sums gradients with the others."""

    @contextmanager
    def alone(self: DDP, index: int, count: int) -> Iterator[None]:
        with self.model.no_sync():
            yield

    return mock.patch.object(DDP, "microbatch", alone)


def divide_by_microbatches() -> Any:
    """The loss is divided by the micro-batches, although it is one by valid tokens of all."""
    of = GradientScale.of

    def wrong(self: GradientScale, inputs: Any, tokens: int) -> StepScale:
        scale = of(self, inputs, tokens)
        return scale._replace(per_token=scale.per_token / len(inputs.microbatches))

    return mock.patch.object(GradientScale, "of", wrong)


def lose_buffers() -> Any:
    """Buffers get memory in place of the meta device, and no values."""

    def allocate(model: nn.Module, device: torch.device, *dtypes: Any) -> None:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.zeros_like(buffer, device=device))

    return mock.patch.object(fsdp2, "init_buffers", allocate)


FAULTS = {
    "dropped reduction": (drop_reduction, "ddp", 1, "gradient of ", "times"),
    "divisor under accumulation": (
        divide_by_microbatches,
        "fsdp2-accum",
        1,
        "gradient of ",
        "has 0.5 times the norm",
    ),
    "buffer lost on meta": (
        lose_buffers,
        "fsdp2",
        0,
        "buffer inv_freq",
        "has 0 times the norm",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_sharding_is_named_with_tensor_and_step(
    name: str, tmp_path: Path
) -> None:
    """Oracle: what the fault changes first."""
    patch, row, step, tensor, text = FAULTS[name]
    verdict = verdict_with(patch, "llama_debug", row, tmp_path)
    assert verdict.outcome is Outcome.differs
    assert verdict.step == step
    assert verdict.tensor is not None and verdict.tensor.startswith(tensor)
    assert f"{verdict.tensor} at step {step}" in verdict.text
    assert text in verdict.text


def test_an_exception_of_a_rank_is_a_failure_of_its_row(tmp_path: Path) -> None:
    """Oracle: the message of the exception."""

    def fail() -> Any:
        broken = mock.Mock(side_effect=ValueError("no kernel for this"))
        return mock.patch.object(GradientScale, "of", broken)

    verdict = verdict_with(fail, "llama_debug", "fsdp2", tmp_path)
    assert verdict.outcome is Outcome.failed
    assert "ValueError: no kernel for this" in verdict.text


ROW_OF_LAYOUT = {
    "ep 2": "ep",
    "cp 2 gathered": "cp-gathered",
    "cp 2 ulysses": "cp-ulysses",
    "hsdp": "hsdp",
    "fsdp2": "fsdp2",
    "tp 2": "tp",
    "pp 2 gpipe": "pp",
    "pp 2 1f1b": "pp-1f1b",
    "pp 2 interleaved": "pp-interleaved",
}
OF_LAYOUT_MODE = {"bias of rows on each rank", "gradient of row biases divided"}
"""Bugs of code that only ``train.deterministic=layout`` runs."""
NORMS = {
    "replicas counted in the norm",
    "norm weights counted on each rank",
    "norm of the rank's own shard",
}
"""Bugs that change the norm first, and no tensor before it."""
CAUGHT = [
    name
    for name, bug in BUGS.items()
    if bug.layout in ROW_OF_LAYOUT and name not in OF_LAYOUT_MODE
]
SHORT = {"missing all-reduce of norms' gradients"}


@pytest.mark.parametrize("name", by_level(CAUGHT, SHORT))
def test_bugs_that_others_have_shipped_are_found_at_step_1(
    name: str, tmp_path: Path
) -> None:
    """Oracle: the bugs of ``scripts/parity.py --inject``, in the default mode."""
    bug = BUGS[name]
    row = ROW_OF_LAYOUT[bug.layout]
    verdict = verdict_with(bug.patch, bug.model, row, tmp_path)
    assert verdict.outcome is Outcome.differs, verdict.text
    assert verdict.step == 1
    assert verdict.tensor is not None or name in NORMS
