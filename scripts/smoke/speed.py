"""Checks of commands and speed: torchrun, the first command, and a 1B model with the device's idle
time."""

import gc
import os
import pickle
import shlex
import statistics
import subprocess
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.device import GIB
from fsdptoys.device.profile import hardware_for, load_hardware
from fsdptoys.errors import ConfigError
from fsdptoys.plan.predict import predict
from fsdptoys.train.distributed import process_group
from fsdptoys.train.trainer import Trainer
from scripts.benchmarks.peers.ours import fill
from scripts.common.child_environment import ROOT, child_environment
from scripts.smoke.commands import fsdptoys, losses_of, train_command
from scripts.smoke.report import Report
from scripts.smoke.runs import COMMON, RANK, TINY, split_rows

STEPS = 9
WARMUP = 3
PROFILED = 2
"""Of a row: all steps, the first ones without figures, and the last ones, which the profiler slows
down."""
MODEL = shlex.split(
    "model=llama3_1b train.batch_size=4 train.seq_len=4096 parallel.param_dtype=bfloat16 "
    "memory.chunk_loss=true"
)
"""Of all rows on CUDA."""
ROWS = split_rows({
    "fsdp2 foreach": "parallel=fsdp2 optim.implementation=foreach",
    "fsdp2 fused": "parallel=fsdp2 optim.implementation=fused",
    "single fused": "parallel=single optim.implementation=fused",
    "single fused compiled": (
        "parallel=single optim.implementation=fused train.compile=true"
    ),
})  # fmt: skip


def check_speed(report: Report, device: str) -> None:
    """Tokens/s, MFU and peak of each row, the planner's prediction of them, and the device's idle
    time."""
    os.environ.update(RANK)
    model = (
        MODEL
        if device == "cuda"
        else [*TINY, "parallel.param_dtype=bfloat16", "memory.chunk_loss=true"]
    )
    common = [*COMMON, *model, f"launch.device={device}"]
    # At 1e-3 losses of other roundings are 2% apart after nine steps.
    common += [f"train.steps={STEPS}", "optim.lr=1e-4"]
    rows = {
        name: [*common, *overrides]
        for name, overrides in ROWS.items()
        if device == "cuda" or "compile" not in overrides[-1]
    }
    first: list[float] = []
    with process_group(compose_config([*COMMON, f"launch.device={device}"])):
        for name, overrides in rows.items():
            try:
                config = compose_config(overrides)
                config.validate(1, device)
                facts, losses = _measure(config)
            except ConfigError as error:
                report.fact(name, f"refused: {error}")
                continue
            if device == "cuda":
                facts |= _predict(config, device)
            report.fact(name, facts)
            first = first or losses
            report.close(f"{name}: losses against the first row's", losses, first, 2e-2)


def _measure(config: Config) -> tuple[dict[str, Any], list[float]]:
    """Figures of the steps between the warm-up and the profiled ones, and all losses."""
    profiler: Any = None
    waits = Counter[str]()
    gc.collect()
    if torch.cuda.is_initialized():
        # otherwise this row's reserved memory includes the previous row's cache
        torch.cuda.empty_cache()
    # The same values in every row.
    torch.manual_seed(0)
    trainer = Trainer(config, param_init=fill)

    @contextmanager
    def around_step(step: int) -> Iterator[None]:
        nonlocal profiler
        if step == WARMUP + 1:
            trainer.world.device.reset_peak_memory()
        if step == STEPS - PROFILED + 1 and trainer.world.device.type == "cuda":
            trainer.world.device.synchronize()
            profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            )
            profiler.start()
        if step == STEPS and trainer.world.device.type == "cuda":
            with _counted_waits(waits):
                yield
        else:
            yield

    trainer.around_step = around_step
    trainer.train()
    trainer.world.device.synchronize()
    timed = trainer.history[WARMUP : STEPS - PROFILED]
    facts: dict[str, Any] = {
        "losses": [step.loss for step in trainer.history],
        "step_ms": 1e3 * statistics.median(step.step_time_seconds for step in timed),
        "tokens_per_second": statistics.median(
            step.tokens_per_second for step in timed
        ),
        "mfu": timed[-1].mfu,
        "peak_gib": timed[-1].memory_peak_gib,
        "reserved_gib": timed[-1].memory_reserved_gib,
    }
    if profiler is not None:
        profiler.stop()
        kernels = [
            (event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        facts["profiled_steps"] = PROFILED
        facts["host_waits"] = dict(waits)
        facts |= idle_time(kernels)
    return facts, [step.loss for step in trainer.history]


@contextmanager
def _counted_waits(waits: Counter[str]) -> Iterator[None]:
    """Count the operations that PyTorch's ``set_sync_debug_mode`` reports, by the line of Python
    that called them.

    Explicit synchronizations of the device are not among them.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchronizing" in str(warning.message):
            waits[f"{Path(warning.filename).name}:{warning.lineno}"] += 1


def idle_time(kernels: list[tuple[float, float]]) -> dict[str, float]:
    """Busy and idle milliseconds of a device.

    Args:
        kernels: start and end in microseconds.
    """
    busy = 0.0
    until = 0.0
    for start, end in sorted(kernels):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    span = until - min(start for start, _ in kernels)
    return {"device_busy_ms": busy / 1e3, "device_idle_ms": (span - busy) / 1e3}


def _predict(config: Config, device: str) -> dict[str, Any]:
    hardware = hardware_for(torch.cuda.get_device_name(), device)
    if hardware is None:
        return {"predicted": "no profile of this device"}
    profile = load_hardware(hardware)
    prediction = predict(config, profile, 1)
    return {
        "predicted_step_ms": 1e3 * prediction.time.step_seconds,
        "predicted_peak_gib": prediction.memory.peak_bytes / GIB,
    }


def check_torchrun(report: Report, device: str) -> None:
    """A run under torchrun against the project's launcher, and the allocator's settings in its
    memory snapshot."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overrides = ["train.steps=3"]
        if device != "cpu":
            overrides += shlex.split(
                "profile.enabled=true profile.snapshot=true profile.snapshot_first_step=2 "
                "profile.skip_steps=0 profile.active_steps=1 profile.snapshot_steps=1"
            )
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        fsdptoys(train_command(device, "own", *overrides), folder)
        fsdptoys(train_command(device, "torchrun", *overrides), folder, torchrun)
        report.close(
            "losses under torchrun",
            losses_of(folder / "torchrun"),
            losses_of(folder / "own"),
            1e-6,
        )
        if device != "cuda":
            return
        for run in ("own", "torchrun"):
            snapshots = sorted((folder / run / "profile").glob("*.pickle"))
            report.expect(bool(snapshots), f"{run}: the memory snapshot was written")
            for path in snapshots[:1]:
                settings = pickle.loads(path.read_bytes()).get("allocator_settings", {})
                expandable = settings.get("expandable_segments")
                report.expect(
                    bool(expandable),
                    f"{run}: expandable_segments is {expandable} in the allocator",
                )


def check_first_command(report: Report, device: str) -> None:
    """``bash run_fsdp.sh`` with three steps: the model that it chooses fits, and its loss falls."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = shlex.split(
            f"train.steps=3 launch.device={device} metrics.run_dir={folder}/run "
            "metrics.log_every=1 metrics.console=plain"
        )
        if device != "cuda":
            overrides += ["experiment=null", *TINY, "launch.nproc_per_node=1"]
        command = ["bash", str(ROOT / "run_fsdp.sh"), *overrides]
        process = subprocess.run(
            command, cwd=folder, env=child_environment(), capture_output=True, text=True
        )
        lines = (process.stdout + process.stderr).strip().splitlines()
        report.fact("first lines", lines[:6])
        report.expect(
            process.returncode == 0,
            f"run_fsdp.sh ends with status {process.returncode}: {lines[-1:]}",
        )
        if process.returncode == 0:
            losses = losses_of(Path(folder) / "run")
            report.expect(
                len(losses) == 3 and all(0 < loss < 20 for loss in losses),
                f"losses {losses} are plausible",
            )
