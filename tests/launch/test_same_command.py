"""The three ways to start a run are the same run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.cli.main import main
from tests.harness.coverage import without_coverage
from tests.harness.resumed_runs import metrics_of

ROOT = Path(__file__).parents[2]

OVERRIDES = [
    *(
        "experiment=null",
        "launch.device=cpu",
        "metrics.console=plain",
        "model=llama_debug",
        "train.steps=3",
    ),
    *(
        "train.seq_len=32",
        "train.grad_accum=2",
        "train.eval_every=2",
        "data.ragged=true",
    ),
]

COMMANDS = {
    "python": [sys.executable, "-m", "fsdptoys", "train"],
    "torchrun": [
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--rdzv-backend=c10d",
        ),
        *("--rdzv-endpoint=localhost:0", "-m", "fsdptoys", "train"),
    ],
    "nproc_per_node": [
        sys.executable,
        "-m",
        "fsdptoys",
        "train",
        "launch.nproc_per_node=2",
    ],
}


def start(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; its run directory, in the folder, has its name."""
    return subprocess.run(
        [*COMMANDS[name], *OVERRIDES, f"metrics.run_dir={name}"],
        cwd=folder,
        # The launcher would inherit the threads that the tests fix.
        env={
            key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"
        }
        | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def read_numbers(run: Path) -> tuple[list[list[Any]], str]:
    """Return the numbers of each step of a run, and its written configuration without names."""
    steps = metrics_of(run)
    numbers = (
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "valid_tokens",
        "eval_loss",
    )
    config = (run / "config.yaml").read_text().replace(f"run_dir: {run.name}\n", "")
    return [[step[name] for name in numbers] for step in steps], config.replace(
        "per_node: 2", "per_node: -1"
    )


@pytest.fixture(scope="module")
def plain(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The plainest of the commands, with new interpreters, when it has ended, and where it ran."""
    folder = tmp_path_factory.mktemp("plain")
    with without_coverage():
        return start("python", folder), folder


def test_train_starts_ranks_and_writes_a_run_directory(
    plain: tuple[subprocess.CompletedProcess[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: exit status, the one line of hardware, one line of metrics a step, the rank's share
    of the cores, which a fork of the launcher does not have by default; repeating the same
    arguments is refused."""
    process, folder = plain
    assert (process.returncode, process.stderr) == (0, "")
    assert (
        process.stdout.count("fsdptoys: ") == 1
        and "with fsdp2 on 2 ranks" in process.stdout
    )
    assert len(read_numbers(folder / "python")[0]) == 3
    environment = json.loads((folder / "python" / "environment.json").read_text())
    assert environment["machine"]["torch_threads"] == max(
        1, len(os.sched_getaffinity(0)) // 2
    )
    monkeypatch.chdir(folder)
    assert main(["train", *OVERRIDES, "metrics.run_dir=python"]) == 2
    again = capsys.readouterr()
    assert again.err.startswith("fsdptoys: metrics.run_dir=python already contains ")
    assert again.out == ""


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", ["torchrun", "nproc_per_node"])
def test_every_launch_command_gives_the_same_numbers(
    name: str, plain: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path
) -> None:
    """Oracle: the plainest command: losses, norms and learning rates of every step, and the written
    configuration."""
    process = start(name, tmp_path)
    # Under load torchrun's own interpreter may abort when it leaves, with all ranks ended well.
    aborted = (
        name == "torchrun"
        and process.returncode == -signal.SIGABRT
        and "Error" not in process.stderr
    )
    assert process.returncode == 0 or aborted, process.stderr
    assert read_numbers(tmp_path / name) == read_numbers(plain[1] / "python")
