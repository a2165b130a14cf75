"""The scripts of docs/toys/stories and docs/toys/synchronization, next to the pages that show their output."""

import re

import pytest
import torch

from fsdptoys.config.compose import compose_config
from fsdptoys.profiler.collectives import Call, CollectiveTrace
from fsdptoys.toys.fsdp.gradients import GradientUnit
from fsdptoys.train.trainer import Trainer
from scripts.ranks import run_ranks
from tests.docs.pages import blocks
from tests.toys.pages import PAGES, load_file

SCRIPTS = {
    "stories/duplicated": "stories/duplicated.md",
    "stories/generators": "stories/generators.md",
    "stories/meta_generator": "stories/meta_generator.md",
    "synchronization/hook_order": "synchronization/README.md",
}
NUMBER = r"\d+(?:\.\d+)?"
TOLERANCE = 0.02
"""Of printed numbers: the last bits of losses depend on the processor."""


@pytest.mark.skipif(torch.__version__ < "2.13" or torch.cuda.is_available(), reason="the pages show torch 2.13 on CPUs")
@pytest.mark.parametrize(
    "script", [pytest.param(script, marks=pytest.mark.extended if "duplicated" in script else ()) for script in SCRIPTS]
)
def test_scripts_print_what_their_pages_show(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the block of the page, word by word, its numbers within 2%."""
    load_file(PAGES / f"{script}.py").main()
    printed = capsys.readouterr().out
    shown = [block.text for block in blocks(PAGES / SCRIPTS[script]) if not block.info]
    words = [re.sub(rf"{NUMBER}| +", " ", text).split() for text in (printed, *shown)]
    assert words[0] in words[1:], printed
    numbers = [
        [float(each) for each in re.findall(NUMBER, text)] for text in (printed, shown[words[1:].index(words[0])])
    ]
    assert numbers[0] == pytest.approx(numbers[1], rel=TOLERANCE), printed


def take_steps(parallel: str, with_bug: bool) -> tuple[list[tuple[float, float]], list[Call]]:
    """Losses and gradient norms of two steps on this rank, and the collectives of the second."""
    if with_bug:
        GradientUnit.take_gradients = load_file(PAGES / "stories/with_bug.py").take_matrices
    words = ["experiment=null", "model=llama_debug", f"parallel={parallel}", "train.steps=2", "metrics.console=none"]
    config = compose_config(words)
    config.validate(2, "cpu")
    trainer = Trainer(config)
    calls: list[Call] = []
    trace = CollectiveTrace(2, trainer.strategy.model, {}, calls.extend)
    trainer.on_phase, trainer.around_step = trace.enter, trace.around
    trainer.train()
    return [(step.loss, step.grad_norm) for step in trainer.history], calls


def test_the_injected_bug_shows_where_the_page_says() -> None:
    """Oracle: fsdp2. Step 1 has its loss and another norm; reductions lack the vectors; without the bug, every bit."""
    runs = [("fsdp2", False), ("toy_fsdp", False), ("toy_fsdp", True)]
    native, toy, bug = run_ranks(2, lambda: [take_steps(*run) for run in runs])[0]
    assert toy[0] == native[0]
    (loss, norm), (bug_loss, bug_norm) = native[0][0], bug[0][0]
    assert bug_loss == loss and bug_norm != norm and bug[0][1][0] != native[0][1][0]
    sizes = [[call.size_bytes for call in calls if call.collective == "reduce_scatter"] for _, calls in (native, bug)]
    # The norms of 64 numbers each: one beside the head, two in each block, none in the embedding.
    assert [one - other for one, other in zip(*sizes, strict=True)] == [256, 512, 512, 0]
