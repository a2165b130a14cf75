"""The interface for Python, held against the command line and against loops of PyTorch alone."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdptoys
from fsdptoys import CallableModule
from fsdptoys.api import parallelize
from fsdptoys.cli.main import main
from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.memory import OptimizerOffload
from tests.harness.pages import ROOT, blocks
from tests.harness.ranks import run_ranks

PAGE = ROOT / "docs" / "python.md"
MOST_LINES = 15
TINY = ["model=llama_debug", "train.steps=3", "train.seq_len=32", "launch.device=cpu"]


def test_import_is_lazy_and_every_name_is_found() -> None:
    """Oracle: the modules of a new interpreter, and ``__all__``."""
    code = """
import sys
import fsdptoys
print(sum(name.startswith("fsdptoys") for name in sys.modules), "torch" in sys.modules)
print(fsdptoys.ConfigError.__name__, fsdptoys.register.model.__name__, "torch" in sys.modules)
print(sorted(set(fsdptoys.__all__) - set(dir(fsdptoys))), hasattr(fsdptoys, "nothing"))
"""
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.stderr == ""
    assert process.stdout.splitlines() == [
        "1 False",
        "ConfigError model False",
        "[] False",
    ]
    for name in fsdptoys.__all__:
        assert hasattr(fsdptoys, name), name
    assert callable(fsdptoys.train) and callable(fsdptoys.plan)
    assert fsdptoys.train.trainer.Trainer is fsdptoys.Trainer


def test_stub_has_every_name() -> None:
    """Oracle: ``__all__``."""
    stub = Path(str(fsdptoys.__file__)).with_suffix(".pyi").read_text(encoding="utf-8")
    names = {line.split()[-1] for line in stub.splitlines() if " as " in line}
    assert names == set(fsdptoys.__all__)


def test_compose_takes_overrides_files_and_mappings(tmp_path: Path) -> None:
    """Oracle: the composition of the typed line."""
    file = tmp_path / "a.yaml"
    file.write_text("model: gpt2_debug\ntrain: {steps: 5, seq_len: 16}\n")
    expected = compose_config(["model=gpt2_debug", "train.steps=7", "train.seq_len=16"])
    tree = {"model": "gpt2_debug", "train": {"steps": 5, "seq_len": 16}}
    for source in (file, str(file), [file], tree):
        assert fsdptoys.compose("train.steps=7", config=source) == expected
    assert tree["train"] == {"steps": 5, "seq_len": 16}
    file.write_text("\ntrain: {steps: 0.5}\n")
    for source, sentence in {
        str(file): r"a\.yaml, line 2: train\.steps=0\.5 must be an integer",
        "absent": "--config absent does not exist",
    }.items():
        with pytest.raises(fsdptoys.ConfigError, match=sentence):
            fsdptoys.compose(config=source)
    with pytest.raises(fsdptoys.ConfigError, match=r"did you mean train\.steps"):
        fsdptoys.compose(config={"train": {"stepz": 3}})
    with pytest.raises(fsdptoys.ConfigError, match="names code to run"):
        fsdptoys.compose(config={"model": {"_target_": "os.system"}})


def train_twice(folder: Path) -> tuple[list[float], list[float], str]:
    """Train in this process, and with the command line."""
    os.chdir(folder)
    os.environ.pop("RANK", None)
    os.environ.pop("WORLD_SIZE", None)
    dist.destroy_process_group()
    overrides = [*TINY, "parallel=single", "metrics.console=none"]
    config = fsdptoys.compose(*overrides, "metrics.run_dir=here")
    before = config.to_dict()
    run = fsdptoys.train(config)
    assert config.to_dict() == before
    assert main(["train", *overrides, "metrics.run_dir=there"]) == 0
    comparison = fsdptoys.compare("here", "there")
    assert comparison.same
    return run.losses, [step.loss for step in run.steps], str(run.result.status.value)


def test_one_rank_trains_in_this_interpreter_like_the_command_line(
    tmp_path: Path,
) -> None:
    """Oracle: the run of the command line, in every bit."""
    ((losses, of_steps, status),) = run_ranks(1, train_twice, tmp_path)
    assert losses == of_steps and len(losses) == 3 and status == "done"


@pytest.mark.launcher
@pytest.mark.usefixtures("warm")
def test_several_ranks_train_in_their_own_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the recorded world size; mistakes and failures are exceptions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = fsdptoys.compose(*TINY, "parallel=fsdp2", "data=synthetic")
    run = fsdptoys.train(config)
    assert run.result.environment["world_size"] == 2 and len(run.losses) == 3
    assert config.metrics.run_dir is None and run.run_dir.parent == Path("runs")
    assert "3 of 3 steps" in capfd.readouterr().out
    config = fsdptoys.compose(*TINY, "parallel=fsdp2", "mesh.fsdp_size=3")
    with pytest.raises(fsdptoys.ConfigError, match=r"^mesh\.fsdp_size=3 must divide"):
        fsdptoys.train(config)


def test_plan_predicts_what_the_command_line_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: ``fsdptoys plan --json``."""
    import json

    overrides = ["model=llama_debug", "data=synthetic", "plan.hardware=h100"]
    overrides.append("plan.world_size=2")
    assert main(["plan", *overrides, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    prediction = json.loads(
        json.dumps(fsdptoys.plan(fsdptoys.compose(*overrides)).to_dict())
    )
    assert prediction == {key: printed[key] for key in prediction}
    with pytest.raises(fsdptoys.ConfigError, match="is not a profile"):
        fsdptoys.plan(fsdptoys.compose(*overrides, "plan.hardware=h10"))


def own_loop(config: Config, batches: list[Tensor], chunk_loss: bool) -> list[float]:
    """Losses of a loop over ranks, each of which takes its rows of a batch."""
    strategy = parallelize(config).strategy
    params = [param for _, param in strategy.trainable_parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    loss_sum = fsdptoys.build_loss(chunk_loss, chunk_tokens=7)
    losses = []
    for batch in batches:
        rows = batch.chunk(dist.get_world_size())[dist.get_rank()]
        loss = strategy.model(rows[:, :-1], rows[:, 1:], loss_sum) / rows[:, 1:].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def test_a_loop_of_ones_own_is_the_same_on_two_ranks_with_chunks_of_the_loss() -> None:
    """Oracle: one process with all logits."""
    overrides = [*TINY, "train.seq_len=16"]
    batches = list(torch.randint(256, (3, 4, 17), generator=torch.manual_seed(3)))
    single = compose_config([*overrides, "parallel=single"])
    sharded = compose_config([*overrides, "parallel=fsdp2"])
    (expected,) = run_ranks(1, own_loop, single, batches, False)
    for losses in run_ranks(2, own_loop, sharded, batches, True):
        assert losses == pytest.approx(expected, rel=1e-6)


def test_parallelize_asks_for_a_process_group() -> None:
    """Oracle: the sentence."""
    with pytest.raises(fsdptoys.ConfigError, match=r"within fsdptoys\.process_group"):
        fsdptoys.parallelize(compose_config(TINY))


def make_model() -> nn.Module:
    """A model that this project does not know."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ],
)
def test_offload_leaves_the_bits_of_any_model(
    kind: Any, options: dict[str, float], overlap: bool
) -> None:
    """Oracle: the optimizer alone, over five steps, and after loading its states."""
    models = [make_model(), make_model()]
    plain = kind(models[0].parameters(), **options)
    offloaded = OptimizerOffload(
        kind(models[1].parameters(), **options),
        models[1],
        bucket_mib=1,
        overlap=overlap,
    )
    assert isinstance(offloaded, torch.optim.Optimizer)
    for step in range(5):
        if step == 3:
            offloaded.load_state_dict(offloaded.state_dict())
        inputs = torch.randn(4, 8, generator=torch.manual_seed(step))
        for model, optimizer in zip(models, (plain, offloaded), strict=True):
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for param, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(param, other)


def test_offload_refuses_what_it_cannot_move() -> None:
    """Oracle: the sentences."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    with pytest.raises(fsdptoys.ConfigError, match=r"state_dtype=torch\.int8 must be"):
        OptimizerOffload(optimizer, model, state_dtype=torch.int8)
    optimizer.step()
    with pytest.raises(fsdptoys.ConfigError, match="before its first step"):
        OptimizerOffload(optimizer, model)


def run_programs(programs: dict[str, str], folder: Path) -> None:
    """Run programs of the page in order, as single processes."""
    os.chdir(folder)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    dist.destroy_process_group()
    for name, text in programs.items():
        exec(compile(text, name, "exec"), {"__name__": "__main__"})


def test_programs_of_the_page_run_in_order(tmp_path: Path) -> None:
    """Oracle: their exit; the loop also runs on two ranks."""
    programs = {
        block.info.split()[1]: block.text
        for block in blocks(PAGE)
        if block.info.startswith("python ")
    }
    assert list(programs) == [
        *("notebook.py", "resume.py", "twice.py", "predict.py", "loop.py"),
    ]
    for text in programs.values():
        assert len([line for line in text.splitlines() if line.strip()]) <= MOST_LINES
    run_ranks(1, run_programs, programs, tmp_path)
    loop = programs["loop.py"]
    run_ranks(2, exec, compile(loop, "loop.py", "exec"), {"__name__": "__main__"})
    assert isinstance(sys.modules["fsdptoys.train"], CallableModule)
