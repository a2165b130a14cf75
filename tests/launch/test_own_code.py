"""Own code in real processes: every way to start ranks loads it, and a run's later commands ask for
it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsdptoys.cli.main import main
from tests.harness.own_code import ROOT, forgotten_imports, write_code

pytestmark = [pytest.mark.launcher, pytest.mark.usefixtures("warm")]

WITHOUT_FORKS = """
import sys
from fsdptoys.cli.main import main
from fsdptoys.launch import launch, supervisor

launch.run_workers = lambda *arguments: supervisor.run_workers(*arguments[:-1], False)
sys.exit(main())
"""
STARTS = {
    "forks": [sys.executable, "-m", "fsdptoys"],
    "interpreters": [sys.executable, "without_forks.py"],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
        *("--standalone", "-m", "fsdptoys"),
    ],
}
SETTINGS = [
    *("train.seq_len=32", "train.steps=3", "launch.device=cpu", "checkpoint.every=2"),
    *("checkpoint.final_weights=true", "optim.lr=0.01"),
]
BUILT_IN = ["optim=adamw", "optim.eps=1e-8", "optim.implementation=for_loop"]


def run(
    start: str, folder: Path, arguments: list[str]
) -> "subprocess.CompletedProcess[str]":
    """Run a command in a folder."""
    (folder / "without_forks.py").write_text(WITHOUT_FORKS)
    ranks = [] if start == "torchrun" else ["launch.nproc_per_node=2"]
    trains = arguments[0] == "train"
    return subprocess.run(
        [*STARTS[start], *arguments, *(ranks if trains else ())],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def losses(run_dir: Path) -> list[float]:
    """Losses of a run."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with own code, and runs of own and of built-in AdamW."""
    folder = tmp_path_factory.mktemp("trained")
    options = write_code(folder, ("data", "model"))
    for name, arguments in {
        "own": [*options, "optim=copied"],
        "built_in": [*options, *BUILT_IN],
    }.items():
        arguments += ["model=own_model", "data=own_data", "data.workers=1", *SETTINGS]
        ended = run("forks", folder, ["train", *arguments, f"metrics.run_dir={name}"])
        assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.limit(300)
def test_own_optimizer_equals_the_built_in_one_bitwise(trained: Path) -> None:
    """Oracle: ``optim=adamw`` with the same model and data, of own code too, which two ranks and
    their data workers read."""
    assert losses(trained / "own") == losses(trained / "built_in")
    assert len(losses(trained / "own")) == 3


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    "start", ["interpreters", pytest.param("torchrun", marks=pytest.mark.extended)]
)
def test_ranks_without_forks_load_the_same_code(
    start: str, trained: Path, tmp_path: Path
) -> None:
    """Oracle: the losses of forks, bitwise."""
    options = write_code(tmp_path, ("data", "model"))
    arguments = [
        *options,
        "optim=copied",
        "model=own_model",
        "data=own_data",
        *SETTINGS,
    ]
    ended = run(start, tmp_path, ["train", *arguments, "metrics.run_dir=own"])
    assert ended.returncode == 0, ended.stderr
    assert losses(tmp_path / "own") == losses(trained / "own")


@pytest.mark.limit(300)
def test_changed_file_is_named_on_resume(trained: Path, tmp_path: Path) -> None:
    """Oracle: the sentence and the steps; the losses before the change stay."""
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    with (folder / "copied.py").open("a") as file:
        file.write("# changed\n")
    options = write_code(tmp_path, ("data", "model"))
    arguments = [
        *options,
        "optim=copied",
        "model=own_model",
        "data=own_data",
        *SETTINGS,
    ]
    arguments += ["checkpoint.resume=auto", "train.steps=4", "metrics.run_dir=own"]
    ended = run("forks", folder, ["train", *arguments])
    assert ended.returncode == 0, ended.stderr
    assert "copied.py has changed since the run recorded its imports" in ended.stderr
    assert losses(folder / "own")[:3] == losses(trained / "own")


@pytest.mark.limit(300)
@pytest.mark.extended
def test_nodes_with_other_code_are_refused(tmp_path: Path) -> None:
    """Oracle: exit status and sentence of ranks that import other contents under one name."""
    for rank in range(2):
        folder = tmp_path / f"node{rank}"
        folder.mkdir()
        write_code(folder)
        with (folder / "copied.py").open("a") as file:
            file.write(f"# {rank}\n")
    train = f"{sys.executable} -m fsdptoys train --import node$LOCAL_RANK/copied.py"
    arguments = " ".join(["optim=copied", "model=llama_debug", *SETTINGS])
    (tmp_path / "rank.sh").write_text(f"exec {train} {arguments} metrics.run_dir=run\n")
    torchrun = [*STARTS["torchrun"][:5], "--no-python", "sh", "rank.sh"]
    ended = subprocess.run(
        torchrun,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode != 0
    assert "rank 1 has loaded other code than rank 0 (copied.py)" in ended.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_commands_ask_for_the_code_of_a_run(
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: one sentence that names the options to add; with them, and for reports without them,
    status 0."""
    monkeypatch.chdir(trained)
    generate = ["generate", "own", "--prompt", "1 2", "--tokenizer", "ids"]
    commands = {
        (*generate, "--tokens", "2"): ["model"],
        ("plan", "calibrate", "own"): ["copied", "model"],
        ("convert", "to-hf", "own", "out"): None,
        ("train", "checkpoint.resume=auto", "metrics.run_dir=own"): None,
        ("train", "checkpoint.resume=own/checkpoints"): None,
    }
    missing = (
        "add --import ./copied.py --import ./own_data.py --import ./own_model.py\n"
    )
    for command, needed in commands.items():
        capsys.readouterr()
        with forgotten_imports():
            assert main(command) == 2
            message = capsys.readouterr().err
            assert message.endswith(missing), message
            assert message.count("\n") == 1
        if needed is not None:
            names = [name if name == "copied" else f"own_{name}" for name in needed]
            options = [part for name in names for part in ("--import", f"{name}.py")]
            with forgotten_imports():
                assert main([*command, *options]) == 0, capsys.readouterr().err
    for command in (("report", "own", "--table"), ("compare", "own", "built_in")):
        with forgotten_imports():
            assert main(command) == 0
    assert "Settings that change the training" in capsys.readouterr().out


@pytest.mark.limit(300)
@pytest.mark.extended
def test_planner_in_new_interpreters_traces_own_code(tmp_path: Path) -> None:
    """Oracle: the plan of tracing processes that are forks."""
    script = (
        "import sys\nfrom fsdptoys.cli.main import main\n"
        "if __name__ == '__main__':\n"
        "    from fsdptoys.plan.trace import tracing_process\n"
        "    can_fork = tracing_process.can_fork\n"
        "    tracing_process.can_fork = lambda: FORKS and can_fork()\n"
        "    sys.exit(main())\n"
    )
    options = write_code(tmp_path, ("model",))
    settings = ["model=own_model", "optim=copied", "plan.hardware=h100"]
    plans = []
    for forks in (True, False):
        (tmp_path / "plan.py").write_text(script.replace("FORKS", str(forks)))
        ended = subprocess.run(
            [sys.executable, "plan.py", "plan", *options, *settings, "--json"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stderr
        plans.append(json.loads(ended.stdout))
    assert plans[0] == plans[1]


@pytest.mark.limit(300)
@pytest.mark.extended
def test_sweep_over_own_options_trains_each_job(tmp_path: Path) -> None:
    """Oracle: the losses of the jobs, which differ, and the sentence of a resume without the
    code."""
    options = write_code(tmp_path)
    arguments = ["optim=copied", "optim.beta2=0.5,0.9", "model=llama_debug", *SETTINGS]
    arguments += ["launch.nproc_per_node=2", "train.eval_every=0"]
    ended = run("forks", tmp_path, ["sweep", *options, *arguments, "--out", "sweep"])
    assert ended.returncode == 0, ended.stderr
    first, second = (
        losses(tmp_path / "sweep" / "jobs" / f"0{n}" / "run") for n in (1, 2)
    )
    assert first[0] == second[0] and first[-1] != second[-1]
    ended = run("forks", tmp_path, ["sweep", "--resume", "sweep"])
    assert ended.returncode == 2
    assert "or add the --import of the code that registers copied" in ended.stderr
