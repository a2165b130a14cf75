"""A run in its directory: files, final weights, sample, traces, patches and waiting times."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

from fsdptoys.config.schema import Config
from fsdptoys.data import TextConfig
from fsdptoys.errors import ConfigError
from fsdptoys.metrics.layout import layout_rows
from fsdptoys.metrics.results import read_result
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, ParallelConfig, SingleConfig
from fsdptoys.profiler import ProfileConfig
from fsdptoys.train import run as run_module
from fsdptoys.train.run import Run, train
from fsdptoys.train.trainer import Trainer
from scripts.ranks import run_ranks
from tests.parallel.runs import make_config

FILES = {"config.yaml", "environment.json", "loss.png", "metrics.jsonl", "result.json", "summary.md"}


def run_in(folder: Path, configs: dict[str, Config]) -> dict[str, list[str]]:
    """Train each configuration; return the files in the run directory that this rank sees at the end."""
    seen = {}
    for name, config in configs.items():
        config.metrics.run_dir = str(folder / name)
        trainer = train(config)
        torch.distributed.barrier()
        assert len(trainer.history) == config.train.steps
        seen[name] = sorted(path.name for path in (folder / name).rglob("*") if path.is_file())
    return seen


def test_every_strategy_writes_all_files_its_layout_and_the_same_sample(tmp_path: Path) -> None:
    """Oracle: the files by name, the meshes, and the text that one process generates after the same steps."""
    (tmp_path / "corpus.txt").write_text("def f(x):\n    return x\n" * 500)

    def config(parallel: ParallelConfig, world_size: int) -> Config:
        made = make_config(parallel, world_size, steps=3, grad_accum=1, eval_every=2, eval_batches=1)
        made.model.vocab_size = 256
        made.data = TextConfig(files=[str(tmp_path / "corpus.txt")], sample_tokens=20, eval_fraction=0.1)
        made.validate(world_size, "cpu")
        return made

    strategies = {parallel.name: config(parallel, 2) for parallel in (DDPConfig(), FSDP1Config(), FSDP2Config())}
    found = run_ranks(1, run_in, tmp_path, {"one": config(SingleConfig(simulated_ranks=2), 1)})
    found += run_ranks(2, run_in, tmp_path, strategies)
    assert all(set(files) == FILES and len(files) == len(FILES) for rank in found for files in rank.values())
    samples = set()
    for name in ("one", *strategies):
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3]
        summary = (tmp_path / name / "summary.md").read_text()
        samples.add(summary.split("## Sample of the trained model")[1].split("## Files")[0])
        result = read_result(tmp_path / name)
        assert result is not None and result.layout is not None
        assert result.layout.mesh == {"one": {}, "ddp": {"replicate": 2}}.get(name, {"shard": 2})
        assert "## Layout" in summary and "- Bytes per rank: " in summary
        assert all(f"| {label} | {text} |" in summary for label, text in layout_rows(result.layout))
    assert len(samples) == 1 and "def " in samples.pop()


def in_run_dir(config: Config, folder: Path, final_weights: bool = False) -> Config:
    config.metrics.run_dir = str(folder)
    config.checkpoint.final_weights = final_weights
    return config


def run_without_room_for_weights(config: Config) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigError("no room")

    run_module.save_weights = refuse
    with pytest.raises(ConfigError, match="no room"):
        Run(Trainer(config)).run()


def test_results_are_kept_if_weights_cannot_be_written(tmp_path: Path) -> None:
    """Oracle: the summary of all steps, although the run ends with an error."""
    config = in_run_dir(make_config(SingleConfig(), 1, steps=2), tmp_path, final_weights=True)
    run_ranks(1, run_without_room_for_weights, config)
    assert "2 of 2; all steps done" in (tmp_path / "summary.md").read_text(encoding="utf-8")


def weights_before_the_sample(config: Config, weights: Path) -> list[str]:
    names: list[str] = []
    Trainer.sample = lambda self: names.extend(sorted(os.listdir(weights)))  # type: ignore[assignment, method-assign]
    Run(Trainer(config)).run()
    return names


def test_weights_are_saved_before_a_sample_is_generated(tmp_path: Path) -> None:
    """Oracle: the folder at the start of sampling, which may take minutes and be interrupted."""
    config = in_run_dir(make_config(SingleConfig(), 1, steps=1), tmp_path, final_weights=True)
    names = run_ranks(1, weights_before_the_sample, config, tmp_path / "weights")[0]
    assert names == ["checksums.json", "weights.safetensors"]


def profile(config: Config, folder: Path) -> list[str]:
    """The traces of a run on two ranks, of which only the first knows the run directory's name."""
    if torch.distributed.get_rank() == 1:
        config.metrics.run_dir = None
    config.profile = ProfileConfig(enabled=True, ranks=[1], skip_steps=1, active_steps=2)
    Run(Trainer(config)).run()
    return sorted(os.listdir(folder / "profile"))


def test_chosen_ranks_write_their_traces_into_the_run_directory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the run directory's listing."""
    config = in_run_dir(make_config(FSDP2Config(), 2), tmp_path)
    assert run_ranks(2, profile, config, tmp_path)[1] == ["rank1.json.gz"]
    assert "`profile/` has the profiles of ranks 1;" in (tmp_path / "summary.md").read_text()
    assert "rank 1: trace of steps 3 to 4" in capfd.readouterr().out


def run_patched(config: Config) -> tuple[dict[str, str], bool]:
    """The run's report on its patches, and whether PyTorch is restored after it."""
    before = FSDPCommContext.lazy_init
    trainer = train(config)
    return dict(trainer.patches.report), FSDPCommContext.lazy_init is before


def test_patches_are_listed_in_the_summary_and_undone_after_the_run(tmp_path: Path) -> None:
    """Oracle: PyTorch's own attribute; the summary's text."""
    report, undone = run_ranks(1, run_patched, in_run_dir(make_config(FSDP2Config(), 1), tmp_path))[0]
    assert report["fsdp2_stream_reuse"].startswith("applied: ")
    assert undone
    summary = (tmp_path / "summary.md").read_text()
    assert all(f"{name}={what}" in summary for name, what in report.items())


DELAY_SECONDS = 10_000.0


def wait_for_data(config: Config) -> None:
    """Train, with a clock that jumps ahead while the third step waits for its batches."""
    trainer = Trainer(config)
    next_step, clock = trainer.batches.next_step, time.perf_counter

    def late_next_step() -> Any:
        if trainer.steps_done == 2:
            time.perf_counter = lambda: clock() + DELAY_SECONDS
        return next_step()

    trainer.batches.next_step = late_next_step  # type: ignore[method-assign]
    Run(trainer).run()


def test_step_records_its_data_wait(tmp_path: Path) -> None:
    """Oracle: the delay of the third step's batches, which counts toward its step time only."""
    config = in_run_dir(make_config(SingleConfig(), 1, steps=4), tmp_path)
    config.validate(1, "cpu")
    run_ranks(1, wait_for_data, config)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [step["data_wait_seconds"] >= DELAY_SECONDS for step in steps] == [False, False, True, False]
    assert all(0 < step["data_wait_seconds"] < step["step_time_seconds"] for step in steps)
