"""Ctrl-C in the terminal of a run."""

import os
import re
import signal
from pathlib import Path

import pytest

from fsdptoys.metrics.config import METRICS_FILE
from tests.harness.launched_training import training, wait_while_running
from tests.harness.resumed_runs import metrics_of

WORDS = (
    "fsdptoys train experiment=null model=llama_debug data=synthetic train.batch_size=1 "
    "train.seq_len=32 launch.nproc_per_node=2 launch.device=cpu metrics.console=plain "
    "optim.schedule=constant metrics.run_dir="
)


@pytest.mark.usefixtures("unmeasured")
def test_interrupted_run_saves_says_how_to_go_on_and_continues(tmp_path: Path) -> None:
    """Oracle: the rows of all steps, each once, after the continuation that the output names."""
    folder = tmp_path / "run"
    argv = f"{WORDS}{folder} train.steps=100000".split()
    with training(argv, tmp_path / "first.txt") as run:
        rows = folder / METRICS_FILE
        wait_while_running(
            [run],
            lambda: rows.exists() and len(rows.read_text().splitlines()) >= 3,
            "three steps",
        )
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal sends it
        status, output = run.result()
    assert status == 130, output
    assert "the same command with checkpoint.resume=auto continues the run" in output
    assert "fsdptoys: stopped by SIGINT; all workers have ended\n" in output
    saved = re.search(r"the newest checkpoint is that of step (\d+)", output)
    assert saved is not None, output
    last = int(saved[1])
    assert (folder / f"checkpoints/step-{last:08}/manifest.json").is_file()

    argv[-1] = f"train.steps={last + 2}"
    with training([*argv, "checkpoint.resume=auto"], tmp_path / "second.txt") as run:
        status, output = run.result()
    assert status == 0, output
    steps = [step["step"] for step in metrics_of(folder)]
    assert steps == list(range(1, last + 3))
