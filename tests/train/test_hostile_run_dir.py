"""Run directories from elsewhere, given to the command itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdptoys.cli.main import main
from fsdptoys.metrics.config import METRICS_FILE
from fsdptoys.utils.file_lock import LOCK_FILE

ROOT = Path(__file__).parents[2]

SMALL = (
    "experiment=null parallel=single model=llama_debug train.batch_size=1 train.seq_len=16 launch.device=cpu "
    "launch.nproc_per_node=1 metrics.console=plain checkpoint.every=1 metrics.run_dir="
)

HANG_SECONDS = 240


@pytest.mark.parametrize("name", [LOCK_FILE, METRICS_FILE])
@pytest.mark.parametrize("kind", ["symbolic link", "named pipe"])
def test_link_or_pipe_in_the_run_directory_stops_the_launch(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: status 2 and one sentence, and the file that the link leads to."""
    (tmp_path / "precious").write_text("precious")
    run = tmp_path / "run"
    run.mkdir()
    if kind == "named pipe":
        os.mkfifo(run / name)
    else:
        (run / name).symlink_to(tmp_path / "precious")
    assert main(["train", *f"{SMALL}{run} checkpoint.resume=auto".split()]) == 2
    assert capsys.readouterr().err == (
        f"fsdptoys: {run}/{name} is a {kind} and not a regular file; remove it, or set metrics.run_dir to another "
        "folder\n"
    )
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.launcher
@pytest.mark.usefixtures("unmeasured")
def test_run_resumes_in_a_folder_with_damaged_files(tmp_path: Path) -> None:
    """Oracle: status 0, the steps, and the content of files that links under temporary and rank names lead to."""
    run, precious = tmp_path / "run", tmp_path / "precious"
    precious.write_text("precious")

    def train(steps: int) -> None:
        words = f"{SMALL}{run} checkpoint.resume=auto train.steps={steps} metrics.log_every=1"
        done = subprocess.run(
            [sys.executable, "-m", "fsdptoys", "train", *words.split()],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr

    train(1)
    (run / "config.yaml").write_text("a: &a [x]\nb: [*a, *a]\n" + "[" * 100_000)
    (run / "environment.json").write_text("[" * 100_000)
    (run / "resumes.jsonl").write_text("[" * 100_000 + '\n{"step": 1}\n')
    (run / "heartbeats").mkdir(exist_ok=True)
    for name in (".config.yaml.part", ".summary.md.part", ".loss.png.part", "heartbeats/rank-00000.json"):
        (run / name).symlink_to(precious)
    train(2)
    assert [json.loads(line)["step"] for line in (run / METRICS_FILE).read_text().splitlines()] == [1, 2]
    assert precious.read_text() == "precious"
    assert (run / "summary.md").is_file() and (run / "checkpoints/step-00000002").is_dir()
