"""The smoke test of a device: its checks on a CPU, checks that fail, and limits of time."""

import io
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fsdptoys.config.compose import compose_config
from scripts import gpu_smoke
from scripts.gpu_planned import words_of
from scripts.gpu_smoke import CHECKS, read_events, run_check
from scripts.smoke import kernels, training
from scripts.smoke.report import Report
from scripts.smoke.runs import COMMON, Trained
from scripts.smoke.speed import idle_time
from scripts.smoke.training import compare


class Recorded(Report):
    """Keeps the comparisons."""

    def __init__(self) -> None:
        self.met: list[str] = []
        self.failed: list[str] = []
        self.facts: dict[str, Any] = {}

    def fact(self, name: str, value: Any) -> None:
        """Keep."""
        self.facts[name] = value

    def expect(self, met: bool, sentence: str) -> None:
        """Keep."""
        (self.met if met else self.failed).append(sentence)


@pytest.mark.parametrize("check", [kernels.check_loss, kernels.check_experts, kernels.check_attention])
def test_checks_of_kernels_pass_on_a_cpu(check: Any) -> None:
    """Oracle: float64, as on an accelerator."""
    report = Recorded()
    check(report, "cpu")
    assert not report.failed and len(report.met) >= 6


def test_wrong_attention_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: attention that sees later tokens, and one with NaN in a gradient."""

    def sees_all(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    monkeypatch.setitem(kernels.IMPLEMENTATIONS, "attention", {"torch": sees_all})
    report = Recorded()
    kernels.check_attention(report, "cpu")
    assert len(report.failed) == 8 and all("torch torch." in sentence for sentence in report.failed)


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


def test_check_over_its_limit_is_killed_and_later_ones_are_left_out() -> None:
    """Oracle: limits shorter than the imports of a check, and no time left."""
    check = gpu_smoke.Check("device", "device:check_device", 0.3)
    assert run_check(check, "cpu", 60.0)["status"] == "timed out"
    assert run_check(CHECKS[0], "cpu", 1.0)["status"] == "left out"


@pytest.mark.extended
def test_script_writes_a_line_of_each_check(tmp_path: Path) -> None:
    """Oracle: the script's output and files for a check that a CPU has and one that it has not."""
    script = Path(gpu_smoke.__file__)
    command = [sys.executable, script, "--device", "cpu", "--checks", "float8", "device", "--out", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "smoke.jsonl").read_text() == done.stdout
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert again.stdout == done.stdout, "a check was repeated"
    device, float8 = map(json.loads, done.stdout.splitlines())
    assert device["status"] == "passed" and torch.__version__ in device["facts"]["machine"]
    assert float8["status"] == "not on cpu" and float8["reason"]
    assert (tmp_path / "out" / "device.log").exists()
    page = (tmp_path / "out" / "smoke.md").read_text()
    assert "| device | passed |" in page and device["facts"]["machine"] in page


def test_idle_time_is_the_span_without_kernels() -> None:
    """Oracle: three kernels by hand, two of which overlap, and a gap of 970 microseconds after the second."""
    norm = "void reduce<" + "x" * 80 + "NormTwoOps<float>"
    found = idle_time([(1000.0, 1100.0, "late"), (0.0, 20.0, norm), (10.0, 30.0, "product")])
    assert found["device_busy_ms"] == pytest.approx(0.13) and found["device_idle_ms"] == pytest.approx(0.97)
    assert found["idle_ms_after"] == {"product": pytest.approx(0.97)}
    assert found["norm_kernel_ms"] == pytest.approx(0.02)


def test_checks_run_side_by_side_in_order_and_those_that_measure_alone() -> None:
    """Oracle: checks that wait for each other, which only two at a time can; one must find no other running."""
    barrier, running = threading.Barrier(2, timeout=120.0), set[str]()

    def run(check: gpu_smoke.Check) -> dict[str, Any]:
        if check.alone:
            assert not running
        else:
            running.add(check.name)
            barrier.wait()
            running.discard(check.name)
        return {"check": check.name}

    checks = [gpu_smoke.Check(name, "", 1.0, alone=name == "c") for name in "abcde"]
    assert [line["check"] for line in gpu_smoke.side_by_side(checks, run, 2)] == list("abcde")


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


def test_kernels_have_no_rows_to_compare() -> None:
    """Oracle: the names of the checks; the others have more than thirty rows."""
    assert not words_of("attention") and len(CUDA_ROWS) > 30


@pytest.mark.parametrize("name", CUDA_ROWS)
def test_rows_are_valid_on_cuda(name: str) -> None:
    """Oracle: the configuration's own checks, which need no device."""
    if name.startswith("float8") or name.endswith(("8-bit", "4-bit")):
        pytest.importorskip("torchao")
    config = compose_config([*COMMON, "launch.device=cuda", *CUDA_ROWS[name]])
    config.validate(1, "cuda")
