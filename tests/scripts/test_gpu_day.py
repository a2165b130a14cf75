"""A day of calls of limited time on a GPU."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


PYTHON = """#!/bin/sh
# Stands for Python: notes the script, and ends with the status that a file holds for it.
name=$(basename "$1")
echo "$name" >> "{calls}"
[ ! -e "{folder}/$name" ] || exit "$(cat "{folder}/$name")"
"""


def run_script(*argv: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = ["bash", str(ROOT / "scripts" / "gpu_day.sh"), *argv]
    return subprocess.run(
        command,
        env={"PATH": "/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
    )


class Machine:
    """Calls on a machine with a Python that only notes the scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.python = folder / "python"
        self.python.write_text(PYTHON.format(calls=self.calls, folder=folder))
        self.python.chmod(0o755)

    def call(self, *argv: str, status: int = 0) -> list[str]:
        """Call the script, expect a status, and return the Python scripts that ran."""
        self.calls.write_text("")
        process = run_script(
            "run", "--out", str(self.folder / "day"), *argv, PYTHON=str(self.python)
        )
        assert process.returncode == status, process.stderr
        return self.calls.read_text().split()

    def set_status(self, script: str, status: int) -> None:
        """Let a script end with a status."""
        (self.folder / script).write_text(str(status))


ALL = [
    "bench_gpu.py",
    "gpu_smoke.py",
    "bench_loss.py",
    "bench_moe.py",
    "bench_memory.py",
    "bench_plan.py",
]


def test_finished_parts_are_not_run_again(tmp_path: Path) -> None:
    """Oracle: scripts of each call; a part with rows left runs again, a missed target or failure
    does not."""
    machine = Machine(tmp_path)
    machine.set_status("gpu_smoke.py", 75)
    machine.set_status("bench_gpu.py", 75)
    machine.set_status("bench_loss.py", 1)
    assert machine.call(status=75) == ALL
    machine.set_status("gpu_smoke.py", 0)
    machine.set_status("bench_gpu.py", 0)
    assert machine.call(status=1) == ["bench_gpu.py", "gpu_smoke.py"]
    assert machine.call("--only", "gpu moe") == []
    (state,) = (tmp_path / "day" / "state").iterdir()
    state.rename(state.with_name("of-other-code"))
    assert machine.call("--only", "gpu moe") == ["bench_gpu.py", "bench_moe.py"]


def test_fresh_machine_continues_from_the_archive(tmp_path: Path) -> None:
    """Oracle: no script runs again where only the archive of the earlier call is left."""
    machine = Machine(tmp_path)
    machine.call("--only", "loss")
    shutil.rmtree(tmp_path / "day")
    assert machine.call("--only", "loss moe") == ["bench_moe.py"]


@pytest.mark.extended
def test_dry_run_writes_a_page(tmp_path: Path) -> None:
    """Oracle: the page of one real part on a CPU; its target is an exit status of 0 or 1."""
    argv = [
        "run",
        "--device",
        "cpu",
        "--tiny",
        "--only",
        "loss",
        "--out",
        str(tmp_path / "day"),
    ]
    process = run_script(*argv, PYTHON=sys.executable, OMP_NUM_THREADS="1")
    assert process.returncode in (0, 1), process.stderr
    page = (tmp_path / "day" / "loss.md").read_text()
    assert (
        "python scripts/benchmarks/bench_loss.py --device cpu" in page
        and "64 tokens" in page
    )
    assert (tmp_path / "day.tar.gz").exists()
