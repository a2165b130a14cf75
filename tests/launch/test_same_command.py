"""The three ways to start a run are the same run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdptoys.cli.main import main

ROOT = Path(__file__).parents[2]

OVERRIDES = [
    "experiment=null",
    "launch.device=cpu",
    "metrics.console=plain",
    "model=llama_debug",
    "train.steps=3",
    "train.seq_len=32",
    "train.grad_accum=2",
    "train.eval_every=2",
    "data.ragged=true",
]

COMMANDS = {
    "python": [sys.executable, "-m", "fsdptoys", "train"],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "-m", "fsdptoys", "train"),
    ],
    "nproc_per_node": [sys.executable, "-m", "fsdptoys", "train", "launch.nproc_per_node=2"],
}


def start(name: str, folder: Path, measured: bool) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; its run directory, in the folder, has its name; coverage slows interpreters down."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    env = {key: value for key, value in env.items() if measured or not key.startswith("COVERAGE_PROCESS_")}
    return subprocess.run(
        [*COMMANDS[name], *OVERRIDES, f"metrics.run_dir={name}"],
        cwd=folder,
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """The plainest of the commands when it has ended, and where it ran."""
    folder = tmp_path_factory.mktemp("plain")
    return start("python", folder, measured=False), folder


@pytest.mark.launcher
def test_train_starts_ranks_and_writes_a_run_directory(
    plain: tuple[subprocess.CompletedProcess[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: exit status, the one line of hardware, one line of metrics a step, the rank's share of the cores, which a
    fork of the launcher does not have by default; repeating the same arguments is refused."""
    done, folder = plain
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("fsdptoys: ") == 1 and "with fsdp2 on 2 ranks" in done.stdout
    assert len((folder / "python" / "metrics.jsonl").read_text().splitlines()) == 3
    environment = json.loads((folder / "python" / "environment.json").read_text())
    cores = len(os.sched_getaffinity(0))
    assert environment["machine"]["torch_threads"] == max(1, cores // 2)
    monkeypatch.chdir(folder)
    assert main(["train", *OVERRIDES, "metrics.run_dir=python"]) == 2
    again = capsys.readouterr()
    assert again.err.startswith("fsdptoys: metrics.run_dir=python already contains ")
    assert again.out == ""


@pytest.mark.launcher
@pytest.mark.usefixtures("warm")
def test_every_launch_command_gives_the_same_numbers(
    plain: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path
) -> None:
    """Oracle: each other, the plainest as new interpreters and the others as forks: losses, norms and learning rates of
    every step, and the written configuration."""
    done, folder = plain
    results = []
    for name in COMMANDS:
        if name != "python":
            done, folder = start(name, tmp_path, measured=name == "nproc_per_node"), tmp_path
        assert done.returncode == 0, done.stderr
        steps = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        assert len(steps) == 3
        numbers = ("step", "loss", "grad_norm", "learning_rate", "valid_tokens", "eval_loss")
        config = (folder / name / "config.yaml").read_text().replace(f"run_dir: {name}\n", "")
        config = config.replace("nproc_per_node: 2", "nproc_per_node: -1")
        results.append(([[step[name] for name in numbers] for step in steps], config))
    assert results[0] == results[1] == results[2]
