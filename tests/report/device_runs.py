"""Runs on an imaginary accelerator, with numbers invented for pictures: a sweep, and a profiled
run."""

import dataclasses
import math
import pickle
from pathlib import Path

from fsdptoys.device import GIB
from fsdptoys.metrics import StepMetrics
from fsdptoys.metrics.prediction import (
    Category,
    MemoryPrediction,
    Prediction,
    TimePrediction,
)
from fsdptoys.sweep import Job, JobStatus, Skipped, Sweep
from tests.harness.recorded_runs import GPU_STEP, write_run
from tests.harness.snapshots import make_snapshot

DEVICE = {
    "device.type": "cuda",
    "device.name": "An imagined device",
    "versions.cuda": "12.8",
}
HOSTILE = "<script>document.title='run'</script>"
"""A text that a page must show and not run."""

JOBS = (
    ("fsdp1", "none", False, 0.50, 70.0),
    ("fsdp1", "full", False, 0.62, 40.0),
    ("fsdp1", "full", True, 0.63, 31.0),
    ("fsdp2", "none", False, 0.48, 66.0),
    ("fsdp2", "full", False, 0.60, 36.0),
    ("fsdp2", "full", True, 0.61, 27.0),
)
"""Strategy, checkpointing, chunked loss, step seconds, GiB reserved."""


def device_steps(count: int, seconds: float, gib: float) -> list[StepMetrics]:
    """Steps, the first two slow and every 97th slightly slow, with a falling, noisy loss."""
    steps = []
    for n in range(1, count + 1):
        time = (
            20 * seconds
            if n == 1
            else 3 * seconds
            if n == 2
            else seconds * (1 + 0.02 * math.sin(n) + (n % 97 == 0))
        )
        steps.append(
            dataclasses.replace(
                GPU_STEP,
                step=n,
                loss=2 + 6 / (1 + n / 40) + 0.05 * math.sin(n * 1.7),
                grad_norm=1 + 10 / n,
                learning_rate=1e-3 * min(1, n / 50),
                step_time_seconds=time,
                tokens_per_second=65536 / time,
                valid_tokens=65536,
                memory_allocated_gib=gib * 0.4,
                memory_peak_gib=gib * 0.9,
                memory_reserved_gib=gib,
                eval_loss=2.5 if n == count else None,
            )
        )
    return steps


def device_prediction(seconds: float, gib: float) -> Prediction:
    """A prediction with all of its parts."""
    parts = (0.1, 0.1, 0.25, 0.1, 0.05, 0.02, 0.28, 0.06, 0.01, 0.03)
    sizes = {
        kind: int(share * 0.88 * gib * GIB)
        for kind, share in zip(Category, parts, strict=True)
    }
    memory = MemoryPrediction(
        int(0.4 * gib * GIB),
        sum(sizes.values()),
        int(0.96 * gib * GIB),
        "backward",
        sizes,
        {"compute": int(gib * GIB)},
    )
    kinds = {
        "matrix products": 0.6 * seconds,
        "attention": 0.12 * seconds,
        "element-wise": 0.1 * seconds,
    }
    time = TimePrediction(
        0.95 * seconds,
        0.82 * seconds,
        0.08 * seconds,
        0.01 * seconds,
        0.04 * seconds,
        kinds,
    )
    return Prediction("traced", "imagined", 8, 65536, 1e14, 1e15, memory, time)


def write_device_sweep(path: Path) -> Path:
    """A sweep of six finished jobs, one of them without a prediction, two unfinished jobs, and a
    skipped combination.
    """
    jobs = []
    for number, (strategy, checkpointing, chunk, seconds, gib) in enumerate(JOBS, 1):
        settings = {
            "parallel.name": strategy,
            "memory.gradient_checkpointing": checkpointing,
            "memory.chunk_loss": chunk,
        }
        varied = {
            key.removesuffix(".name"): str(value).lower()
            for key, value in settings.items()
        }
        jobs.append(
            Job(f"{number:02}", (), varied, f"print {number}", JobStatus.completed, 0)
        )
        prediction = None if number == 3 else device_prediction(seconds, gib)
        steps = device_steps(120, seconds, gib)
        settings["train.steps"] = len(steps)
        write_run(
            path / "jobs" / jobs[-1].name / "run",
            steps,
            settings,
            DEVICE,
            prediction=prediction,
        )
    more = {"parallel": "ddp", "memory.gradient_checkpointing": "none"}
    reason = f"the memory of the cuda device ran out on rank 0 {HOSTILE}"
    jobs.append(
        Job(
            "07",
            (),
            {**more, "memory.chunk_loss": "false"},
            "print 7",
            JobStatus.out_of_memory,
            1,
            reason,
        )
    )
    jobs.append(
        Job(
            "08",
            (),
            {**more, "memory.chunk_loss": "true"},
            "print 8",
            JobStatus.timed_out,
            1,
            "it took too long",
        )
    )
    skipped = [
        Skipped({"parallel": "single"}, "one process has no ranks to shard over")
    ]
    Sweep(
        path, "imagined", f"fsdptoys sweep imagined {HOSTILE}", jobs, skipped, None
    ).write()
    return path


def write_device_run(path: Path) -> Path:
    """One run with a prediction, a memory snapshot and a table of operators."""
    write_run(
        path,
        device_steps(300, 0.5, 70.0),
        environment=DEVICE,
        prediction=device_prediction(0.5, 70.0),
    )
    (path / "profile").mkdir()
    (path / "profile" / "memory-rank0.pickle").write_bytes(
        pickle.dumps(make_snapshot())
    )
    (path / "summary.md").write_text(
        "# imagined\n\n## What came out\n\n| result | value |\n| --- | --- |\n| steps | 300 of "
        "300; all steps done |\n| reference: unigram entropy of the data | 3.2437 nats |\n\n## "
        "Where the time and the memory went\n\nRank 0, steps 5 to 7.\n\n| operator | calls | "
        "self device time |\n| --- | ---: | ---: |\n| `aten::mm` | 1,350 | 12.50 ms |\n| `a\\|b` "
        "| 3 | 1,000.00 ms |\n\n## Files\n"
    )
    return path
