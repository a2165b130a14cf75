"""Failed imports of PyTorch because an automatically loaded backend fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdptoys.cli.system_errors import explain_autoload

ROOT = Path(__file__).parents[2]

MESSAGE = "libhccl.so: cannot open shared object file: No such file or directory"
"""Of torch_npu 2.13.0 on a machine without CANN."""


@pytest.fixture
def broken_backend(tmp_path: Path) -> Path:
    """A folder with a distribution like torch_npu's, whose entry point fails as it does without CANN."""
    (tmp_path / "torch_npu.py").write_text(f"raise ImportError({MESSAGE!r})\n")
    described = tmp_path / "torch_npu-2.13.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (described / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return tmp_path


def run(line: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in an interpreter that finds the distributions of a folder."""
    return subprocess.run(
        [sys.executable, "-m", "fsdptoys", *line.split()],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"} | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    "line",
    [
        "models",
        pytest.param("train launch.device=cpu --cfg job", marks=pytest.mark.extended),
        pytest.param("plan model=llama_debug", marks=pytest.mark.extended),
    ],
)
def test_backend_that_fails_to_load_is_reported_in_one_sentence(line: str, broken_backend: Path) -> None:
    """Oracle: PyTorch's error with torch_npu's reason."""
    done = run(line, broken_backend)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"fsdptoys: PyTorch cannot be imported, since the installed torch_npu cannot be loaded [{MESSAGE}]; to use "
        "NPUs install the CANN that it is made for and source its set_env.sh, and to do without them set "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment\n"
    )


@pytest.mark.extended
@pytest.mark.parametrize(
    ("line", "environment"),
    [("train --help", {}), ("train launch.device=cpu --cfg job", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})],
)
def test_backend_that_fails_to_load_is_left_alone(line: str, environment: dict[str, str], broken_backend: Path) -> None:
    """Oracle: exit status 0; help needs no PyTorch, and the suggested variable helps."""
    done = run(line, broken_backend, **environment)
    assert done.returncode == 0, done.stderr


def test_torch_npu_with_a_cuda_build_of_pytorch_asks_for_the_cpu_build() -> None:
    """Oracle: the error of torch_npu 2.13.0's ``_check_device_conflict``."""
    error = RuntimeError("Failed to load the backend extension: torch_npu. You can disable extension auto-loading")
    error.__cause__ = RuntimeError("Two accelerators cannot be used at the same time in PyTorch: npu and cuda. You can")
    sentence = explain_autoload(error)
    assert (
        sentence is not None
        and "; to use NPUs install PyTorch's build for CPUs, and to do without them set" in sentence
    )


def test_other_errors_are_not_explained() -> None:
    """Oracle: only errors of PyTorch's backend loader are explained."""
    assert explain_autoload(RuntimeError("Failed to load the model")) is None
    assert explain_autoload(ValueError("Failed to load the backend extension: torch_npu. You can")) is None
