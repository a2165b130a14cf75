"""Measurements on a GPU: its smoke test, its benchmark, and its rows next to the planner's."""

import dataclasses
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
from scripts.benchmarks import bench_gpu
from scripts.benchmarks.bench_gpu import SHAPES, why
from scripts.benchmarks.gpu_page import (
    ACCELERATE,
    BARE,
    COMPILED,
    EAGER,
    FLOAT8,
    STEPS,
    Row,
    judge,
)
from scripts.benchmarks.peers.measure import Measured
from scripts.gpu_smoke import read_events
from scripts.planner import gpu_planned
from scripts.planner.gpu_planned import overrides_of
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


@pytest.mark.parametrize(
    "check", [kernels.check_loss, kernels.check_experts, kernels.check_attention]
)
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
    compare(report, "row", row, Trained([5.0, 4.0, 3.0]), 1e-5)
    assert len(report.failed) == failures


@pytest.mark.parametrize(
    ("output", "errors", "status", "expected"),
    [
        (
            '["met", "a", null]\nnoise\n["fact", "b", 2]\n',
            "",
            0,
            ("passed", 1, [], {"b": 2}),
        ),
        (
            '["met", "a", null]\n["failed", "c", null]\n',
            "",
            0,
            ("failed", 1, ["c"], {}),
        ),
        ('["fact", "b", 2]\n', "", 0, ("failed", 0, [], {"b": 2})),
        ('["met", "a", null]\n["fa', "", None, ("timed out", 1, [], {})),
        ("", "Traceback\nRuntimeError: no\n", 1, ("crashed", 0, [], {})),
    ],
)
def test_check_passes_only_if_all_comparisons_are_met(
    output: str, errors: str, status: int | None, expected: tuple[Any, ...]
) -> None:
    """Oracle: the status by hand; a check without comparisons and a process that died have
    failed."""
    line = read_events(io.StringIO(output), io.StringIO(errors), status)
    assert tuple(line[key] for key in ("status", "met", "failed", "facts")) == expected
    assert ("RuntimeError: no" in line.get("reason", "")) == (
        line["status"] == "crashed"
    )


@pytest.mark.extended
def test_script_writes_a_line_of_each_check(tmp_path: Path) -> None:
    """Oracle: the script's output and files for a check that a CPU has and one that it has not."""
    script = Path(gpu_smoke.__file__)
    command = [
        sys.executable,
        script,
        "--device",
        "cpu",
        "--checks",
        "float8",
        "device",
        "--out",
        tmp_path / "out",
    ]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert (tmp_path / "out" / "smoke.jsonl").read_text() == process.stdout
    device, float8 = map(json.loads, process.stdout.splitlines())
    assert (
        device["status"] == "passed" and torch.__version__ in device["facts"]["machine"]
    )
    assert float8["status"] == "not on cpu" and float8["reason"]
    page = (tmp_path / "out" / "smoke.md").read_text()
    assert "| device | passed |" in page and device["facts"]["machine"] in page


BF16 = ["parallel.param_dtype=bfloat16"]
COMPARED = ("memory", "compile", "float8", "optimizers", "adapters", "speed")
CUDA_ROWS = {
    f"{check}, {name}": overrides
    for check in COMPARED
    for name, overrides in overrides_of(check).items()
}
CUDA_ROWS |= {
    f"{name} in layout mode": [
        *overrides,
        "parallel=fsdp2",
        *BF16,
        "train.deterministic=layout",
    ]
    for name, overrides in training.layout_models("cuda").items()
}
CUDA_ROWS |= {
    f"adapters alone, {name}": [*overrides, *training.SINGLE]
    for name, overrides in training.adapter_rows("cuda").items()
}


@pytest.mark.parametrize("name", CUDA_ROWS)
def test_rows_are_valid_on_cuda(name: str) -> None:
    """Oracle: the configuration's own checks, which need no device."""
    if name.startswith("float8") or name.endswith(("8-bit", "4-bit")):
        pytest.importorskip("torchao")
    config = compose_config([*COMMON, "launch.device=cuda", *CUDA_ROWS[name]])
    config.validate(1, "cuda")


SHAPE = SHAPES[0]
SPEEDS: dict[str, float | None] = {
    COMPILED: 1000.0,
    BARE: 900.0,
    FLOAT8: 1300.0,
    EAGER: 700.0,
    ACCELERATE: 600.0,
}
"""Tokens per second that meet every target; 1000 is 51% of the peak."""


def row_of(contestant: str, speed: float | None) -> Row:
    """A row with this speed, or one that ran out of memory."""
    if speed is None:
        return Row(SHAPE.name, contestant, "", failure="out of memory")
    return Row(SHAPE.name, contestant, "", speed, speed * 0.51e-3, losses=[12.0, 11.0])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        (
            {COMPILED: 970.0},
            ["missed: llama3_8b-8192 compiled has 49.5% MFU, target 50%"],
        ),
        (
            {FLOAT8: 1200.0},
            ["missed: llama3_8b-8192 float8 has 1.20 of bf16's tokens/s, target 1.25"],
        ),
        (
            {ACCELERATE: 1250.0},
            ["missed: llama3_8b-8192 compiled has 0.80 of the tokens/s of accelerate"],
        ),
        (
            {BARE: None, ACCELERATE: None},
            ["not measured: llama3_8b-8192 against a peer"],
        ),
        (
            {COMPILED: None},
            ["not measured: llama3_8b-8192 FSDPToys, compiled: out of memory"],
        ),
    ],
)
def test_verdicts_are_met_missed_or_not_measured(
    changes: dict[str, float | None], expected: list[str]
) -> None:
    """Oracle: verdicts by hand."""
    verdicts = judge(
        [row_of(name, speed) for name, speed in {**SPEEDS, **changes}.items()], [SHAPE]
    )
    unmet = [line for line in verdicts if not line.startswith("met")]
    assert [
        line[: len(text)] for line, text in zip(unmet, expected, strict=True)
    ] == expected


@pytest.mark.parametrize(("loss", "is_missed"), [(12.1, False), (12.2, True)])
def test_a_first_loss_more_than_1_percent_apart_is_missed(
    loss: float, is_missed: bool
) -> None:
    """Oracle: 12.0 and 1% of it."""
    rows = [row_of(name, speed) for name, speed in SPEEDS.items()]
    rows = [
        dataclasses.replace(row, losses=[loss, 11.0]) if row.contestant == BARE else row
        for row in rows
    ]
    assert (
        any("begins with the loss" in line for line in judge(rows, [SHAPE]))
        == is_missed
    )


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (
            "status 1 after 0\ntorch.OutOfMemoryError: CUDA out of memory. Tried to",
            "out of memory",
        ),
        (
            "status -9 after 0 of 8 steps\nkilled after 90 s",
            "no end within its time, 0 of 8 steps done",
        ),
        ("status 1\nValueError: no", "failed: ValueError: no"),
    ],
)
def test_failed_row_gives_its_reason(failure: str, reason: str) -> None:
    """Oracle: messages of PyTorch and Python."""
    assert why(Measured(failure=failure)) == reason


@pytest.mark.extended
def test_cpu_trial_writes_rows_and_reports_failed_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: transformers under accelerate, with the same initial values; a peer without a
    script."""
    argv = [
        "--device",
        "cpu",
        "--tiny",
        "--write",
        str(tmp_path / "gpu"),
        "--contestants",
        EAGER,
        BARE,
        ACCELERATE,
    ]
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", *argv])
    monkeypatch.setitem(bench_gpu.CONTESTANTS, BARE, "no_such_peer.py")
    assert bench_gpu.main() == 0
    rows_of_file = json.loads((tmp_path / "gpu.json").read_text())["rows"].values()
    rows = {row["contestant"]: row for row in rows_of_file}
    eager = rows[EAGER]
    failed = rows[BARE]
    peer = rows[ACCELERATE]
    assert eager["tokens_per_second"] > 0 and eager["failure"] is None
    assert len(eager["losses"]) == STEPS and eager["losses"] == pytest.approx(
        peer["losses"], rel=1e-3
    )
    assert failed["tokens_per_second"] is None and failed["failure"].startswith(
        "failed: "
    )
    page = (tmp_path / "gpu.md").read_text()
    assert f"| {BARE} | failed: " in page
    assert (
        f"| {EAGER} | {' | '.join(f'{loss:.3f}' for loss in eager['losses'])} |" in page
    )


@pytest.mark.extended
def test_page_has_the_error_of_each_measured_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the error by hand, of a row with twice the planned peak, and of no row without a
    peak."""
    monkeypatch.setattr(
        gpu_planned,
        "SMALL",
        ["model=llama_debug", "train.batch_size=1", "train.seq_len=16"],
    )
    line = {"check": "memory", "device": "cuda", "facts": {"machine": "one H200"}}
    (planned,) = gpu_planned.compare(
        [line | {"facts": {"plain": {"peak_gib": 1.0}}}], "h200"
    )
    facts = {
        "machine": "one H200",
        "plain": {"peak_gib": 2 * planned.peak_gib},
        "chunk_loss: failed": "a reason",
    }
    (tmp_path / "smoke.jsonl").write_text(json.dumps(line | {"facts": facts}) + "\n")
    page = tmp_path / "page.md"
    argv = [
        "gpu_planned.py",
        str(tmp_path / "smoke.jsonl"),
        "--hardware",
        "h200",
        "--write",
        str(page),
    ]
    monkeypatch.setattr("sys.argv", argv)
    gpu_planned.main()
    (row,) = [
        text for text in page.read_text().splitlines() if text.startswith("| memory")
    ]
    assert (
        row.startswith("| memory | plain |")
        and row.endswith("| -50.00% |")
        and "one H200" in page.read_text()
    )
