"""A run in its directory: what it writes and what is read back, also with links, pipes and damaged
files."""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.data.byte_text import TextConfig
from fsdptoys.device import Device
from fsdptoys.device.profile import load_hardware
from fsdptoys.metrics import (
    Console,
    MetricsConfig,
    RunRecorder,
    StepMetrics,
    environment,
)
from fsdptoys.metrics.config import PREDICTION_FILE, SUMMARY_FILE
from fsdptoys.metrics.layout import layout_rows
from fsdptoys.metrics.prediction import Prediction
from fsdptoys.metrics.results import read_result
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    SingleConfig,
)
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.profiler import ProfileConfig
from fsdptoys.train import text_sample
from fsdptoys.train.recorded_run import is_run_dir, read_recorded_run
from fsdptoys.train.run import Run, train
from fsdptoys.train.trainer import Trainer
from tests.harness.ranks import run_ranks
from tests.harness.resumed_runs import metrics_of
from tests.harness.tiny import make_config

FILES = {
    *(
        "config.yaml",
        "environment.json",
        "loss.png",
        "metrics.jsonl",
        "result.json",
        "summary.md",
    )
}


def run_in(folder: Path, configs: dict[str, Config]) -> dict[str, list[str]]:
    """Train each configuration; return the files in the run directory that this rank sees at the
    end."""
    # a model of three steps writes bytes, which are compared
    text_sample.UNREADABLE = 1.0
    results = {}
    for name, config in configs.items():
        config.metrics.run_dir = str(folder / name)
        trainer = train(config)
        torch.distributed.barrier()
        assert len(trainer.history) == config.train.steps
        results[name] = sorted(
            path.name for path in (folder / name).rglob("*") if path.is_file()
        )
    return results


def test_every_strategy_writes_all_files_its_layout_and_the_same_sample(
    tmp_path: Path,
) -> None:
    """Oracle: the files by name, the meshes, and the text that one process generates after the same
    steps."""
    (tmp_path / "corpus.txt").write_text("def f(x):\n    return x\n" * 500)

    def config(parallel: ParallelConfig, world_size: int) -> Config:
        settings = make_config(
            parallel, world_size, steps=3, grad_accum=1, eval_every=2, eval_batches=1
        )
        settings.model.vocab_size = 256
        settings.data = TextConfig(
            files=[str(tmp_path / "corpus.txt")], sample_tokens=20, eval_fraction=0.1
        )
        settings.validate(world_size, "cpu")
        return settings

    strategies = {
        parallel.name: config(parallel, 2)
        for parallel in (DDPConfig(), FSDP1Config(), FSDP2Config())
    }
    results = run_ranks(
        1, run_in, tmp_path, {"one": config(SingleConfig(simulated_ranks=2), 1)}
    )
    results += run_ranks(2, run_in, tmp_path, strategies)
    assert all(
        set(files) == FILES and len(files) == len(FILES)
        for rank in results
        for files in rank.values()
    )
    samples = set()
    for name in ("one", *strategies):
        lines = metrics_of(tmp_path / name)
        assert [line["step"] for line in lines] == [1, 2, 3]
        summary = (tmp_path / name / "summary.md").read_text()
        samples.add(
            summary.split("## Sample of the trained model")[1].split("## Layout")[0]
        )
        assert "`eval_batches=1`" in summary and "`grad_accum=1`" not in summary
        result = read_result(tmp_path / name)
        assert result is not None and result.layout is not None
        assert result.layout.mesh == {"one": {}, "ddp": {"replicate": 2}}.get(
            name, {"shard": 2}
        )
        assert "## Layout" in summary and "- Bytes per rank: " in summary
        assert all(
            f"| {label} | {text} |" in summary
            for label, text in layout_rows(result.layout)
        )
    assert len(samples) == 1 and "def " in samples.pop()


def in_run_dir(config: Config, folder: Path) -> Config:
    config.metrics.run_dir = str(folder)
    return config


@pytest.mark.parametrize(
    ("text", "is_text"),
    [
        ("def f(x):\n\treturn x\r\n", True),
        ("Grüße, 你好\u3000世界 🙂", True),
        ("ab\ufffd" + "c" * 27, True),
        ("ab\ufffdcd\ufffd", False),
        ("\x00\x1b[2Jabcdefgh", False),
    ],
)
def test_bytes_of_an_untrained_model_are_not_shown_as_text(
    text: str, is_text: bool
) -> None:
    """Oracle: text in three scripts; characters outside UTF-8, and of control, more than a tenth of
    them."""
    assert (text_sample.why_unreadable(text) is None) == is_text


def profile(config: Config, folder: Path) -> list[str]:
    """The traces of a run on two ranks; only the first knows the run directory's name."""
    if torch.distributed.get_rank() == 1:
        config.metrics.run_dir = None
    config.profile = ProfileConfig(
        enabled=True, ranks=[1], skip_steps=1, active_steps=2
    )
    Run(Trainer(config)).run()
    return sorted(os.listdir(folder / "profile"))


def test_chosen_ranks_write_their_traces_into_the_run_directory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the run directory's listing."""
    config = in_run_dir(make_config(FSDP2Config(), 2), tmp_path)
    assert run_ranks(2, profile, config, tmp_path)[1] == ["rank1.json.gz"]
    assert (
        "`profile/` has the profiles of ranks 1;"
        in (tmp_path / "summary.md").read_text()
    )
    assert "rank 1: trace of steps 3 to 4" in capfd.readouterr().out


def run_patched(config: Config) -> tuple[dict[str, str], bool]:
    """The run's report on its patches, and whether PyTorch is restored after it."""
    before = FSDPCommContext.lazy_init
    trainer = train(config)
    return dict(trainer.patches.report), FSDPCommContext.lazy_init is before


def test_patches_are_listed_in_the_summary_and_undone_after_the_run(
    tmp_path: Path,
) -> None:
    """Oracle: PyTorch's own attribute; the summary's text."""
    report, undone = run_ranks(
        1, run_patched, in_run_dir(make_config(FSDP2Config(), 1), tmp_path)
    )[0]
    assert report["fsdp2_stream_reuse"].startswith("applied: ")
    assert undone
    summary = (tmp_path / "summary.md").read_text()
    assert all(f"{name}={what}" in summary for name, what in report.items())


DELAY_SECONDS = 10_000.0


def wait_for_data(config: Config) -> None:
    """Train, with a clock that jumps ahead while the third step waits for its batches."""
    trainer = Trainer(config)
    next_step = trainer.data.batches.next_step
    clock = time.perf_counter

    def late_next_step() -> Any:
        if trainer.steps_done == 2:
            time.perf_counter = lambda: clock() + DELAY_SECONDS
        return next_step()

    trainer.data.batches.next_step = late_next_step  # type: ignore[method-assign]
    Run(trainer).run()


def test_step_records_its_data_wait(tmp_path: Path) -> None:
    """Oracle: the delay of the third step's batches, which counts toward its step time only."""
    config = in_run_dir(make_config(SingleConfig(), 1, steps=4), tmp_path)
    config.validate(1, "cpu")
    run_ranks(1, wait_for_data, config)
    steps = metrics_of(tmp_path)
    assert [step["data_wait_seconds"] >= DELAY_SECONDS for step in steps] == [
        False,
        False,
        True,
        False,
    ]
    assert all(
        0 < step["data_wait_seconds"] < step["step_time_seconds"] for step in steps
    )


STEP = StepMetrics(
    1, 5.5, 1.0, 1e-3, 0.1, 512, 5120.0, 0.1, None, None, None, None, 0.5
)


@pytest.fixture(scope="module")
def config() -> Config:
    composed = compose_config(["experiment=null", "parallel=ddp"])
    composed.validate(2, "cpu")
    return composed


@pytest.fixture(scope="module")
def prediction(config: Config) -> Prediction:
    return fast_estimate(config, load_hardware("h100"), 2)


def record(
    path: Path,
    config: Config,
    prediction: Prediction | None,
    steps: int,
    finish: bool = True,
) -> None:
    """Write a run directory as a run does."""
    metrics = MetricsConfig(run_dir=str(path), console=Console.none)
    recorded_environment = environment(Device("cpu"), 2, ["fsdptoys"])
    with RunRecorder(
        metrics,
        "a run",
        config.to_dict(),
        recorded_environment,
        steps,
        {},
        prediction=prediction,
    ) as recorder:
        for number in range(1, steps + 1):
            recorder.step(
                dataclasses.replace(STEP, step=number, step_time_seconds=0.1 * number)
            )
        if finish:
            recorder.finish("every step was done")


def test_recorded_run_round_trips(
    tmp_path: Path, config: Config, prediction: Prediction
) -> None:
    """Oracle: the recorder's values; the median of 0.3, 0.4 and 0.5 s, after two steps of
    warm-up."""
    record(tmp_path / "run", config, prediction, steps=5)
    run = read_recorded_run(tmp_path / "run")
    assert run.tree == config.to_dict() and run.prediction == prediction
    assert [step.step for step in run.steps] == [1, 2, 3, 4, 5]
    assert run.results.step_time_seconds is not None
    assert run.results.step_time_seconds.median == pytest.approx(0.4)
    assert (run.world_size, run.device_type, run.finished, run.running, run.notes) == (
        2,
        "cpu",
        True,
        False,
        (),
    )
    assert run.config().parallel == config.parallel
    assert {error.quantity for error in run.prediction_errors()} == {
        "step time",
        "tokens/s, all ranks",
    }


def test_killed_run_is_read_up_to_its_last_complete_line(
    tmp_path: Path, config: Config
) -> None:
    """Oracle: three complete lines and a torn one; an unreadable prediction."""
    record(tmp_path / "run", config, None, steps=3, finish=False)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    (tmp_path / "run" / PREDICTION_FILE).write_text('{"method": "older"}')
    run = read_recorded_run(tmp_path / "run")
    assert (run.results.steps, run.finished, run.prediction) == (3, False, None)
    assert (
        len(run.notes) == 2
        and "line 4" in run.notes[0]
        and "another version" in run.notes[1]
    )
    assert (
        is_run_dir(tmp_path / "run") and not (tmp_path / "run" / SUMMARY_FILE).exists()
    )


SMALL = [
    *("experiment=null", "parallel=single", "model=llama_debug", "train.batch_size=1"),
    *("train.seq_len=16", "launch.device=cpu", "launch.nproc_per_node=1"),
    *("metrics.console=plain", "metrics.log_every=1"),
    *("checkpoint.every=1", "checkpoint.resume=auto"),
]


@pytest.mark.launcher
@pytest.mark.usefixtures("unmeasured", "warm")
def test_run_resumes_in_a_folder_with_damaged_files(tmp_path: Path) -> None:
    """Oracle: status 0, the steps, and the content of files that links under temporary and rank
    names lead to."""
    run = tmp_path / "run"
    precious = tmp_path / "precious"
    precious.write_text("precious")

    def train(steps: int) -> None:
        command = [
            sys.executable,
            "-m",
            "fsdptoys",
            "train",
            *SMALL,
            f"metrics.run_dir={run}",
            f"train.steps={steps}",
        ]
        process = subprocess.run(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert process.returncode == 0 and "Traceback" not in process.stderr, (
            process.stderr
        )

    train(1)
    (run / "config.yaml").write_text("a: &a [x]\nb: [*a, *a]\n" + "[" * 100_000)
    (run / "environment.json").write_text("[" * 100_000)
    (run / "resumes.jsonl").write_text("[" * 100_000 + '\n{"step": 1}\n')
    (run / "heartbeats").mkdir(exist_ok=True)
    for name in (
        ".config.yaml.part",
        ".summary.md.part",
        ".loss.png.part",
        "heartbeats/rank-00000.json",
    ):
        (run / name).symlink_to(precious)
    train(2)
    assert [step["step"] for step in metrics_of(run)] == [1, 2]
    assert precious.read_text() == "precious"
    assert (run / "summary.md").is_file() and (
        run / "checkpoints/step-00000002"
    ).is_dir()
