"""The example loops of docs/toys/loops."""

import itertools
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from scripts.ranks import run_ranks
from tests.toys.pages import PAGES, load_file

LOOPS = PAGES / "loops"
PARTS = ("toy_cp", "toy_ep")


def load_run(folder: Path, name: str = "run") -> ModuleType:
    """``run.py`` or another script as a module that takes its loops from ``folder``."""
    module = load_file(LOOPS / f"{name}.py")
    module.HERE = folder
    return module


def test_each_loop_has_the_bits_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: one process that takes the batches of both ranks, in losses and parameters."""
    run = load_run(LOOPS)
    assert run.main([]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["single", *run.LOOPS]
    assert all(line.endswith("every bit of one process") for line in printed[1:])


def test_loops_over_parts_have_the_losses_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the same model and batches on one rank, where nothing is split."""
    assert load_run(LOOPS, "split").main() == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["one", *PARTS]


@pytest.mark.parametrize("name", [*load_run(LOOPS).LOOPS, *PARTS])
def test_a_loop_has_at_most_20_lines(name: str) -> None:
    """Oracle: counted."""
    _, _, loop = (LOOPS / f"{name}.py").read_text(encoding="utf-8").partition("def train")
    assert loop.count("\n") <= 20


@pytest.mark.parametrize(
    ("script", "name", "line", "others"),
    [
        ("run", "toy_zero2", "    zero.attach(optimizer)\n", ["single"]),
        ("split", "toy_cp", "        parallel.sum_gradients()\n", ["toy_ep"]),
        ("split", "toy_ep", "        sum_gradients(model, same)\n", ["toy_cp"]),
    ],
)
def test_a_loop_without_its_exchange_is_reported(
    script: str, name: str, line: str, others: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the same script on a copy of a loop whose ranks never exchange their updates or gradients."""
    for other in others:
        shutil.copy(LOOPS / f"{other}.py", tmp_path)
    text = (LOOPS / f"{name}.py").read_text(encoding="utf-8")
    assert line in text
    (tmp_path / f"{name}.py").write_text(text.replace(line, ""), encoding="utf-8")
    assert load_run(tmp_path, script).main(*([[name]] if script == "run" else [])) == 1
    assert script == "split" or "DIFFERS" in capsys.readouterr().out


def average_unevenly() -> list[bool]:
    """Whether gradients are the means, if rank 1 leaves a layer out and the first of two batches is not sent."""
    own = load_run(LOOPS).load("own")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 3) for _ in range(2)]
    averaged = own.Averaged(reversed(layers))
    inputs = torch.randn(2, 2, 5, 3)  # rank, batch, rows, columns
    for batch in range(2):
        averaged.enabled = batch == 1
        hidden = inputs[dist.get_rank(), batch]
        for layer in layers[: 2 - dist.get_rank()]:
            hidden = layer(hidden)
        hidden.sum().backward()
    means = [param.grad for layer in layers for param in layer.parameters()]
    expected = [torch.zeros_like(param) for layer in layers for param in layer.parameters()]
    for rank, batch in itertools.product(range(2), range(2)):
        hidden = inputs[rank, batch]
        for layer in layers[: 2 - rank]:
            hidden = layer(hidden)
        params = [param for layer in layers[: 2 - rank] for param in layer.parameters()]
        for number, grad in enumerate(torch.autograd.grad(hidden.sum(), params)):
            expected[number] += grad / 2
    return [torch.allclose(one, other) for one, other in zip(means, expected, strict=True)]


def test_own_synchronization_handles_unused_modules_and_accumulation() -> None:
    """Oracle: the mean of all ranks' gradients, computed on each rank from all inputs."""
    assert run_ranks(2, average_unevenly) == [[True] * 4] * 2
