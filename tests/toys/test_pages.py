"""Programs and numbers of docs/toys: loops, answers to questions, stories; and CITATION.cff."""

import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

import fsdptoys
from fsdptoys.config.compose import compose_config
from fsdptoys.profiler.collectives import Call, CollectiveTrace
from fsdptoys.toys.buckets import assign_buckets
from fsdptoys.toys.fsdp.unit import FullUnit
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from scripts.toys.toys_memory import MIB, expected
from tests.harness.pages import blocks, commands
from tests.harness.ranks import run_ranks
from tests.toys.page_files import PAGES, ROOT, load_file

LOOPS = PAGES / "loops"


PARTS = ("toy_cp", "toy_ep")


def load_run(folder: Path, name: str = "run") -> ModuleType:
    """``run.py`` or another script as a module that takes its loops from ``folder``."""
    module = load_file(LOOPS / f"{name}.py")
    module.HERE = folder
    return module


def test_each_loop_has_the_bits_of_one_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: one process that takes the batches of both ranks, in losses and parameters."""
    run = load_run(LOOPS)
    assert run.main([]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["single", *run.LOOPS]
    assert all(line.endswith("every bit of one process") for line in printed[1:])


def test_loops_over_parts_have_the_losses_of_one_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the same model and batches on one rank, without any split."""
    assert load_run(LOOPS, "split").main() == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "one",
        *PARTS,
    ]


@pytest.mark.parametrize("name", [*load_run(LOOPS).LOOPS, *PARTS])
def test_a_loop_has_at_most_20_lines(name: str) -> None:
    """Oracle: counted."""
    _, _, loop = (
        (LOOPS / f"{name}.py").read_text(encoding="utf-8").partition("def train")
    )
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
    script: str,
    name: str,
    line: str,
    others: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the same script on a copy of a loop without the exchange of updates or
    gradients."""
    for other in others:
        shutil.copy(LOOPS / f"{other}.py", tmp_path)
    text = (LOOPS / f"{name}.py").read_text(encoding="utf-8")
    assert line in text
    (tmp_path / f"{name}.py").write_text(text.replace(line, ""), encoding="utf-8")
    assert load_run(tmp_path, script).main(*([[name]] if script == "run" else [])) == 1
    assert script == "split" or "DIFFERS" in capsys.readouterr().out


def average_unevenly() -> list[bool]:
    """Whether gradients are the means, if rank 1 leaves a layer out and the first of two batches is
    not sent."""
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
    params = [param for layer in layers for param in layer.parameters()]
    means = [param.grad for param in params]
    expected = torch.autograd.grad(
        layers[0](inputs[1]).sum() / 2 + layers[1](layers[0](inputs[0])).sum() / 2,
        params,
    )
    return [
        torch.allclose(one, other) for one, other in zip(means, expected, strict=True)
    ]


def test_own_synchronization_handles_unused_modules_and_accumulation() -> None:
    """Oracle: the mean of all ranks' gradients, computed on each rank from all inputs."""
    assert run_ranks(2, average_unevenly) == [[True] * 4] * 2


RANKS = 8


def test_answers_have_the_computed_numbers() -> None:
    """Oracle: GPT-2 XL on the meta device, the toys' layouts and buckets, ``toys_memory.py``'s
    formulas."""
    with torch.device("meta"):
        model = compose_config(["experiment=null", "model=gpt2_xl"]).model.build()
    params = list(model.parameters())
    count = sum(param.numel() for param in params)
    block = sum(param.numel() for param in model.layers[0].parameters())
    rest = count - len(model.layers) * block
    vector = [torch.Size([count])]  # divisible by the ranks: no padding
    state_bytes = [
        sum(expected(kind, vector, RANKS, 0, 25 * MIB))
        for kind in ("ddp", "zero1", "zero2", "fsdp")
    ]
    buckets = assign_buckets(params[::-1], 25 * MIB)
    sent = 4 * count * (RANKS - 1) // RANKS
    rows = [len(chunk) for chunk in params[0].chunk(RANKS)]
    padding = (RANKS * rows[0] - sum(rows)) * params[0].shape[1] * 4
    numbers: dict[int, list[Any]] = {
        1: state_bytes,
        2: [2 * sent, 3 * sent],
        4: [len(buckets), max(param.nbytes for param in params[1:]), params[0].nbytes],
        5: [(4 + 1) / 2],
        6: [2 * len(model.layers) + 1, len(model.layers) + 1],
        7: [4 * block, 4 * rest],
        8: [rows[0], rows[-1], padding],
    }
    page = (PAGES / "questions.md").read_text(encoding="utf-8")
    _, _, text = page.partition("## Answers\n")
    answers = [
        " ".join(answer.split())
        for answer in text.replace("\n   ", " ").strip().split("\n")
    ]
    assert [answer.partition(".")[0] for answer in answers] == [
        str(number) for number in range(1, 11)
    ]
    for number, values in numbers.items():
        for value in values:
            assert (f"{value:,}" if value >= 10_000 else str(value)) in answers[
                number - 1
            ], (
                number,
                value,
            )
    for value in (count, block, rest):
        assert f"{value:,}" in page


def test_citation_has_the_packages_version_and_licence() -> None:
    """Oracle: the required keys of CFF 1.2.0, the package's version, and pyproject.toml."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys() and cited[
        "cff-version"
    ] == "1.2.0"
    assert cited["version"] == fsdptoys.__version__
    assert f'license = "{cited["license"]}"' in (ROOT / "pyproject.toml").read_text(
        encoding="utf-8"
    )


SCRIPTS = {
    "stories/duplicated": "stories/duplicated.md",
    "stories/generators": "stories/generators.md",
    "stories/meta_generator": "stories/meta_generator.md",
    "synchronization/hook_order": "synchronization/README.md",
}
NUMBER = r"\d+(?:\.\d+)?"
TOLERANCE = 0.02
"""Of printed numbers: the last bits of losses depend on the processor."""


@pytest.mark.skipif(
    torch.__version__ < "2.13" or torch.cuda.is_available(),
    reason="the pages show torch 2.13 on CPUs",
)
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            script, marks=pytest.mark.extended if "duplicated" in script else ()
        )
        for script in SCRIPTS
    ],
)
def test_scripts_print_what_their_pages_show(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the block of the page, word by word, its numbers within 2%."""
    load_file(PAGES / f"{script}.py").main()
    printed = capsys.readouterr().out
    page_texts = [
        block.text for block in blocks(PAGES / SCRIPTS[script]) if not block.info
    ]
    texts = [
        re.sub(rf"{NUMBER}| +", " ", text).split() for text in (printed, *page_texts)
    ]
    assert texts[0] in texts[1:], printed
    numbers = [
        [float(number) for number in re.findall(NUMBER, text)]
        for text in (printed, page_texts[texts[1:].index(texts[0])])
    ]
    assert numbers[0] == pytest.approx(numbers[1], rel=TOLERANCE), printed


def take_steps(
    parallel: str, with_bug: bool
) -> tuple[list[tuple[float, float]], list[Call]]:
    """Losses and gradient norms of two steps on this rank, and the collectives of the second."""
    if with_bug:
        FullUnit.take_gradients = load_file(PAGES / "stories/with_bug.py").take_matrices
    overrides = [
        "experiment=null",
        "model=llama_debug",
        f"parallel={parallel}",
        "train.steps=2",
        "metrics.console=none",
    ]
    config = compose_config(overrides)
    config.validate(2, "cpu")
    trainer = Trainer(config)
    calls: list[Call] = []
    trace = CollectiveTrace(2, trainer.strategy.model, {}, calls.extend)
    trainer.on_phase = trace.enter
    trainer.around_step = trace.around
    trainer.train()
    return [(step.loss, step.grad_norm) for step in trainer.history], calls


def printed_by(overrides: list[str], folder: Path) -> list[str]:
    """What a run prints outside its table of steps."""
    config = compose_config(
        [*overrides, "metrics.console=none", f"metrics.run_dir={folder}"]
    )
    config.validate(2, "cpu")
    run = Run(Trainer(config))
    messages: list[str] = []
    run._say = lambda *texts: messages.extend(texts)  # type: ignore[method-assign]
    run.run()
    return messages


def test_page_shows_the_collectives_that_its_command_prints(tmp_path: Path) -> None:
    """Oracle: the table that a run of the page's command prints, to the letter."""
    page = PAGES / "README.md"
    command = next(
        line for line in commands(page) if "debug.trace_collectives=true" in line
    )
    overrides = command.split()[2:]
    tables = [
        block.text
        for block in blocks(page)
        if block.text.startswith("collectives of step")
    ]
    assert (
        tables[0].rstrip("\n")
        in run_ranks(2, printed_by, overrides, tmp_path / "run")[0]
    )


def test_the_injected_bug_shows_where_the_page_says() -> None:
    """Oracle: fsdp2. Step 1 has its loss and another norm; reductions lack the vectors; without the
    bug, every bit."""
    runs = [("fsdp2", False), ("toy_fsdp", False), ("toy_fsdp", True)]
    native, toy, bug = run_ranks(2, lambda: [take_steps(*run) for run in runs])[0]
    assert toy[0] == native[0]
    (loss, norm) = native[0][0]
    (bug_loss, bug_norm) = bug[0][0]
    assert bug_loss == loss and bug_norm != norm and bug[0][1][0] != native[0][1][0]
    sizes = [
        [call.size_bytes for call in calls if call.collective == "reduce_scatter"]
        for _, calls in (native, bug)
    ]
    # The norms of 64 numbers each: one beside the head, two in each block, none in the embedding.
    assert [one - other for one, other in zip(*sizes, strict=True)] == [
        256,
        512,
        512,
        0,
    ]
