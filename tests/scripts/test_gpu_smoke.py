"""The smoke test of a device: its checks on a CPU, checks that fail, and limits of time."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptoys.config.compose import compose_config
from scripts import gpu_smoke
from scripts.gpu_planned import words_of
from scripts.gpu_smoke import read_events
from scripts.smoke import kernels, training
from scripts.smoke.report import Report
from scripts.smoke.runs import COMMON, Trained
from scripts.smoke.training import compare


class Recorded(Report):
    """Comparisons in lists."""

    def __init__(self) -> None:
        self.met: list[str] = []
        self.failed: list[str] = []

    def fact(self, name: str, value: Any) -> None:
        """Ignore."""

    def expect(self, met: bool, sentence: str) -> None:
        """Record."""
        (self.met if met else self.failed).append(sentence)


@pytest.mark.parametrize("check", [kernels.check_loss, kernels.check_experts, kernels.check_attention])
def test_checks_of_kernels_pass_on_a_cpu(check: Any) -> None:
    """Oracle: float64, as on an accelerator."""
    report = Recorded()
    check(report, "cpu")
    assert not report.failed and len(report.met) >= 6


@pytest.mark.parametrize(
    ("row", "failures"),
    [
        (Trained([5.0, 4.0, 3.0], [1.0, 1.0, 1.0]), 0),
        (Trained([5.0, 4.0, 3.001], [1.0, 1.0, 1.0]), 1),
        (Trained([5.0, 4.0, float("nan")], [1.0, 1.0, float("nan")]), 2),
        (Trained(error="cpu_offload needs an accelerator", refused=True), 0),
        (Trained(error="RuntimeError: CUDA error"), 1),
    ],
)
def test_losses_other_than_the_oracles_fail(row: Trained, failures: int) -> None:
    """Oracle: losses by hand."""
    report = Recorded()
    compare(report, "cuda", "row", row, Trained([5.0, 4.0, 3.0]), 1e-5)
    assert len(report.failed) == failures


@pytest.mark.parametrize(
    ("output", "errors", "status", "expected"),
    [
        ('["met", "a", null]\nnoise\n["fact", "b", 2]\n', "", 0, ("passed", 1, [], {"b": 2})),
        ('["met", "a", null]\n["failed", "c", null]\n', "", 0, ("failed", 1, ["c"], {})),
        ('["fact", "b", 2]\n', "", 0, ("failed", 0, [], {"b": 2})),
        ('["met", "a", null]\n["fa', "", None, ("timed out", 1, [], {})),
        ("", "Traceback\nRuntimeError: no\n", 1, ("crashed", 0, [], {})),
    ],
)
def test_check_passes_only_if_all_comparisons_are_met(
    output: str, errors: str, status: int | None, expected: tuple[Any, ...]
) -> None:
    """Oracle: the status by hand; a check without comparisons and a process that died have failed."""
    line = read_events(io.StringIO(output), io.StringIO(errors), status)
    assert tuple(line[key] for key in ("status", "met", "failed", "facts")) == expected
    assert ("RuntimeError: no" in line.get("reason", "")) == (line["status"] == "crashed")


@pytest.mark.extended
def test_script_writes_a_line_of_each_check(tmp_path: Path) -> None:
    """Oracle: the script's output and files for a check that a CPU has and one that it has not."""
    script = Path(gpu_smoke.__file__)
    command = [sys.executable, script, "--device", "cpu", "--checks", "float8", "device", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "smoke.jsonl").read_text() == done.stdout
    device, float8 = map(json.loads, done.stdout.splitlines())
    assert device["status"] == "passed" and torch.__version__ in device["facts"]["machine"]
    assert float8["status"] == "not on cpu" and float8["reason"]
    page = (tmp_path / "out" / "smoke.md").read_text()
    assert "| device | passed |" in page and device["facts"]["machine"] in page


BF16 = ["parallel.param_dtype=bfloat16"]
COMPARED = ("memory", "compile", "float8", "optimizers", "adapters", "speed")
CUDA_ROWS = {f"{check}, {name}": words for check in COMPARED for name, words in words_of(check).items()}
CUDA_ROWS |= {
    f"{name} in layout mode": [*words, "parallel=fsdp2", *BF16, "train.deterministic=layout"]
    for name, words in training.layout_models("cuda").items()
}
CUDA_ROWS |= {
    f"adapters alone, {name}": [*words, *training.SINGLE] for name, words in training.adapter_rows("cuda").items()
}


@pytest.mark.parametrize("name", CUDA_ROWS)
def test_rows_are_valid_on_cuda(name: str) -> None:
    """Oracle: the configuration's own checks, which need no device."""
    if name.startswith("float8") or name.endswith(("8-bit", "4-bit")):
        pytest.importorskip("torchao")
    config = compose_config([*COMMON, "launch.device=cuda", *CUDA_ROWS[name]])
    config.validate(1, "cuda")
