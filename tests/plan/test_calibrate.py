"""Calibration recovers the rates behind synthetic measurements, and leaves the others alone."""

import dataclasses
import io
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.device.profile import Hardware, Quantity, load_hardware
from fsdptoys.errors import ConfigError
from fsdptoys.metrics.prediction import MemoryPrediction, Prediction, TimePrediction
from fsdptoys.plan.calibrate import (
    PARAMETERS,
    Calibration,
    Case,
    calibrate,
    calibrate_command,
    calibrate_runs,
    choose_parameters,
    error,
    read_run,
)
from fsdptoys.plan.simulator.allocator import NativeAllocator
from fsdptoys.plan.simulator.events import (
    Collective,
    HostWork,
    Kernel,
    KernelKind,
    Mark,
    RecordEvent,
    Trace,
    Transfer,
    WaitEvent,
)
from fsdptoys.plan.simulator.replay import replay
from tests.harness import recorded_runs
from tests.harness.recorded_runs import STEP

H100 = load_hardware("h100")
TODAY = date(2026, 1, 31)


def changed(hardware: Hardware, **factors: float) -> Hardware:
    values = {
        name: Quantity(getattr(hardware, name).value * factor, "truth")
        for name, factor in factors.items()
    }
    return dataclasses.replace(hardware, **values)  # type: ignore[arg-type]


def step_of(
    *, tflops: float = 1, gb: float = 1, small: int = 0, gathered_gb: float = 0, size: int = 8,
    copied_gb: float = 0, copies: int = 1, updated: int = 0,
) -> Callable[[Hardware], float]:  # fmt: skip
    """Seconds of one step as a replay of a made-up trace: matmuls, traffic, small kernels, a
    gather, copies, AdamW."""
    events: list[Any] = [Mark(1, "forward")]
    events += [Kernel("mm", 0, KernelKind.matmul, tflops * 1e12, 0, "bfloat16")]
    events += [
        Kernel("attention", 0, KernelKind.attention, tflops * 1e11, 0, "bfloat16")
    ]
    events += [Kernel("add", 0, KernelKind.memory, 0, round(gb * 1e9), "bfloat16")]
    events += [Kernel("add", 0, KernelKind.memory, 0, 1, "bfloat16")] * small
    if gathered_gb:
        events += [
            WaitEvent(0, 1),
            Collective("all_gather", 1, round(gathered_gb * 1e9), size, 1, "shard"),
        ]
        events += [RecordEvent(1, 1), WaitEvent(1, 0)]
    events += [Transfer(0, round(copied_gb * 1e9 / copies), True, True)] * (
        copies if copied_gb else 0
    )
    if updated:
        events.append(HostWork("adam", 0, updated, worker=False))
    trace = Trace(events)
    return lambda hardware: (
        replay(trace, hardware, NativeAllocator()).time().step_seconds
    )


RUNS = {
    "compute": step_of(tflops=500),
    "traffic": step_of(tflops=10, gb=1500),
    "small": step_of(tflops=0.01, gb=0.01, small=3_000),
    "gather": step_of(gathered_gb=300),
    "gather far": step_of(gathered_gb=300, size=1024),
    "copies": step_of(copied_gb=40),
    "many copies": step_of(copied_gb=0.1, copies=3_000),
    "host": step_of(updated=3_000_000_000),
}
TRUTH = changed(
    H100, matmul_efficiency=0.8, attention_efficiency=0.8, memory_efficiency=1.1,
    host_operator_seconds=1.7, host_collective_seconds=1.7, intra_node_efficiency=0.9,
    inter_node_efficiency=0.6, transfer_bandwidth=0.5, transfer_latency_seconds=4.0,
    cpu_adam_parameters_per_second=0.3,
)  # fmt: skip


def cases(*names: str, truth: Hardware = TRUTH) -> list[Case]:
    return [Case(RUNS[name], RUNS[name](truth), name) for name in names]


@pytest.mark.usefixtures("unmeasured")
def test_runs_that_determine_all_rates_recover_them() -> None:
    """Oracle: the rates behind the measurements."""
    result = calibrate(cases(*RUNS), H100, today=TODAY)
    for parameter in PARAMETERS:
        for field in parameter.fields:
            fitted = getattr(result.hardware, field).value
            true = getattr(TRUTH, field).value
            assert fitted == pytest.approx(true, rel=0.02), field
    assert not result.unknown and all(
        abs(error(row, row.after_seconds)) < 0.01 for row in result.fitted
    )
    assert max(abs(error(row, row.before_seconds)) for row in result.fitted) > 0.5


def test_rates_without_effect_are_reported_and_not_fitted() -> None:
    """Oracle: runs that only compute: links, copies and the host's AdamW keep value and source."""
    result = calibrate(cases("compute", "traffic"), H100, today=TODAY)
    links = ("links within a machine", "links between machines")
    assert result.unknown == (
        "host",
        *links,
        "transfers",
        "latency of transfers",
        "AdamW on the host",
    )
    assert set(result.changes) == {
        "matmul_efficiency",
        "attention_efficiency",
        "memory_efficiency",
    }
    for field in dataclasses.fields(Hardware):
        if field.name not in (*result.changes, "attention_backends"):
            assert getattr(result.hardware, field.name) == getattr(H100, field.name)


def test_one_run_is_fitted_with_the_smallest_change() -> None:
    """Oracle: a run that mostly computes moves the compute rate nearly alone, and the prediction
    meets the run."""
    result = calibrate(cases("compute"), H100, today=TODAY)
    (row,) = result.fitted
    assert abs(error(row, row.after_seconds)) < 0.002
    before, after = result.changes["matmul_efficiency"]
    assert after / before == pytest.approx(0.8, rel=0.01)
    source = "calibrated from compute on 2026-01-31; before that 0.72"
    assert result.hardware.matmul_efficiency.source == source
    assert (
        result.hardware.attention_efficiency.value / H100.attention_efficiency.value
        == pytest.approx(0.8, rel=0.01)
    )
    for backend, share in result.hardware.attention_backends.items():
        assert share.value / H100.attention_backends[backend].value == pytest.approx(
            0.8, rel=0.01
        )
    assert result.hardware.memory_efficiency.value == pytest.approx(
        H100.memory_efficiency.value, rel=0.01
    )


def test_fitted_efficiencies_stay_within_their_bounds() -> None:
    """Oracle: the bounds: a run twice as fast as all of the peak allows stays unexplained."""
    truth = changed(H100, matmul_efficiency=3.0, attention_efficiency=3.0)
    result = calibrate(cases("compute", truth=truth), H100, today=TODAY)
    assert result.hardware.matmul_efficiency.value == 1.0
    (row,) = result.fitted
    assert 0.5 < error(row, row.after_seconds) < error(row, row.before_seconds)


def test_contradictory_runs_share_the_error() -> None:
    """Oracle: least squares of logarithms: the same run measured at 1 and at 4 seconds gives 2."""
    step = step_of(tflops=700, gb=0)
    result = calibrate(
        [Case(step, 1.0, "a"), Case(step, 4.0, "b")],
        H100,
        choose_parameters(["compute"]),
        today=TODAY,
    )
    assert result.fitted[0].after_seconds == pytest.approx(2.0, rel=0.01)


def write_run(
    folder: Path,
    config: Config,
    seconds: list[float],
    device: str = "NVIDIA H100 80GB HBM3",
) -> Path:
    """Write a run directory on eight devices."""
    steps = [
        dataclasses.replace(STEP, step=step, step_time_seconds=second)
        for step, second in enumerate(seconds, 1)
    ]
    kind = "cuda" if "H100" in device else "npu"
    environment = {"world_size": 8, "device.type": kind, "device.name": device}
    return recorded_runs.write_run(folder, steps, config.to_dict(), environment)


@pytest.fixture(scope="module")
def config() -> Config:
    overrides = [
        "model=llama_debug",
        "parallel=fsdp2",
        "experiment=null",
        "memory.gradient_checkpointing=full",
    ]
    return compose_config(
        [
            *overrides,
            "parallel.wrap=block_attn_mlp",
            "train.batch_size=3",
            "data=text",
            "train.eval_every=5",
        ]
    )


def predict(config: Config, hardware: Hardware, world_size: int) -> Prediction:
    """Depends on the run by its batch alone."""
    assert world_size == 8
    seconds = step_of(tflops=100 * config.train.batch_size)(hardware)
    nothing = MemoryPrediction(0, 0, 0, "forward")
    return Prediction(
        "test",
        hardware.name,
        world_size,
        1,
        1.0,
        None,
        nothing,
        TimePrediction(seconds, 0, 0, 0, 0),
    )


def test_run_directory_is_read_with_synthetic_data(
    tmp_path: Path, config: Config
) -> None:
    """Oracle: the written files; the median excludes the warm-up of two steps; the data becomes
    synthetic."""
    run, run_config, seconds = read_run(
        write_run(tmp_path / "run", config, [9.0, 9.0, 0.5, 0.7, 0.6])
    )
    assert (run.world_size, run.device_type, seconds) == (8, "cuda", 0.6)
    read = run_config.to_dict()
    expected = config.to_dict() | {name: read[name] for name in ("data", "checkpoint")}
    expected["train"]["eval_every"] = 0
    expected["profile"]["enabled"] = False
    assert read == expected and run_config.data.name == "synthetic"
    run_config.validate(8, "cuda")


def test_command_prints_errors_and_writes_a_profile(
    tmp_path: Path, config: Config
) -> None:
    """Oracle: two runs at 0.8 of the profile's compute rate; the file gives that rate."""
    runs = []
    for batch in (3, 5):
        train = dataclasses.replace(config.train, batch_size=batch)
        seconds = step_of(tflops=100 * batch)(TRUTH)
        runs.append(
            write_run(
                tmp_path / f"run{batch}",
                dataclasses.replace(config, train=train),
                [9, 9, seconds],
            )
        )
    out = tmp_path / "mine.yaml"
    page = io.StringIO()
    argv = [*map(str, runs), f"out={out}"]
    assert calibrate_command(argv, predict, Console(file=page, width=80)) == 0
    calibrated = load_hardware(str(out))
    assert calibrated.matmul_efficiency.value == pytest.approx(0.8 * 0.72, rel=0.01)
    assert re.search(
        r"run3 +0\.\d+ s +0\.\d+ s +-\d+\.\d% +0\.\d+ s +[+-]0\.\d%", page.getvalue()
    )
    text = " ".join(page.getvalue().split())
    assert "matmul_efficiency: 0.72 is now 0.576" in text
    assert (
        "Not fitted, as no run depends on it: memory, host, links within a machine, links between"
        in text
    )
    with pytest.raises(
        ConfigError, match=r"mine.yaml must be a new YAML file; set out=mine_new"
    ):
        calibrate_command(argv, predict, Console(file=page))


HARDWARE_FLAW = (
    "hardware=a2 is a npu device, and .* on a cuda device, NVIDIA H100 80GB "
    "HBM3; set its"
)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "needs a run; write fsdptoys plan calibrate runs/NAME"),
        (
            ["hardwear=h100"],
            "hardwear=h100 is not an option of fsdptoys plan calibrate; it has hardware=NAME and",
        ),
        (
            ["none"],
            "none is no run directory; give one that fsdptoys train has written, as runs/NAME",
        ),
        (
            ["short"],
            "short has 2 steps, none after the warm-up of 2; give a longer run",
        ),
        (
            ["run", "other"],
            r"ran on Ascend910B3 and .*run on NVIDIA H100 80GB HBM3; calibrate one at a time",
        ),
        (["run", "hardware=a2"], HARDWARE_FLAW),
        (
            ["unknown"],
            "there is no profile of Ascend910B4, on which .*; set hardware= to one of 4090, a100, ",
        ),
    ],
)
def test_mistakes_are_reported_in_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: Config,
    argv: list[str],
    sentence: str,
) -> None:
    """Oracle: the expected messages."""
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "run", config, [1.0, 1.0, 1.0])
    write_run(tmp_path / "short", config, [1.0, 1.0])
    write_run(tmp_path / "other", config, [1.0, 1.0, 1.0], device="Ascend910B3")
    write_run(tmp_path / "unknown", config, [1.0, 1.0, 1.0], device="Ascend910B4")
    with pytest.raises(ConfigError, match=sentence):
        calibrate_command(argv, predict, Console(file=io.StringIO()))
    assert isinstance(calibrate_runs([run], None, predict), Calibration)
