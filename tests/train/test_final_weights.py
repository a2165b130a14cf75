"""The final weights of a run: when they are written, kept, set aside and converted."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.checkpoint.config import Form
from fsdptoys.cli.convert import convert_command
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.parallel import (
    FSDP2Config,
    SingleConfig,
)
from fsdptoys.train import final_weights
from fsdptoys.train import run as run_module
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from tests.harness.ranks import run_ranks
from tests.harness.resumed_runs import (
    run_to_the_end,
    run_until,
    with_checkpoints,
)
from tests.harness.tiny import TINY, make_config

pytestmark = pytest.mark.usefixtures("without_pictures")


def with_final_weights(config: Config, run_dir: Path) -> Config:
    config.metrics.run_dir = str(run_dir)
    config.checkpoint.final_weights = True
    return config


def train_to_the_end(config: Config) -> None:
    run_to_the_end(config)


@pytest.mark.parametrize("form", list(Form), ids=lambda form: form.value)
def test_converted_checkpoints_equal_converted_final_weights(
    form: Form, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the folder in Hugging Face format made from the final weights, byte for byte."""
    config = with_checkpoints(
        make_config(FSDP2Config(), 2, steps=2, model=TINY["qwen3_moe"]),
        tmp_path / "run",
        2,
        form=form,
    )
    config.checkpoint.final_weights = True
    run_ranks(2, train_to_the_end, config)
    for source, target in (
        ("run", "final"),
        ("run/checkpoints", "newest"),
        ("run/checkpoints/step-00000002", "named"),
    ):
        assert (
            convert_command(["to-hf", str(tmp_path / source), str(tmp_path / target)])
            == 0
        )
    (tmp_path / "run" / "weights").rename(tmp_path / "weights")
    assert (
        convert_command(
            ["to-hf", str(tmp_path / "run"), str(tmp_path / "run_without_weights")]
        )
        == 0
    )
    assert (
        "holds no final weights; taking those of its newest checkpoint, step-00000002"
        in capsys.readouterr().out
    )
    final = {path.name: path.read_bytes() for path in (tmp_path / "final").iterdir()}
    for target in ("newest", "named", "run_without_weights"):
        assert {
            path.name: path.read_bytes() for path in (tmp_path / target).iterdir()
        } == final
    manifest = tmp_path / "run" / "checkpoints" / "step-00000002" / "manifest.json"
    manifest.unlink()
    with pytest.raises(
        ConfigError, match=r"step-00000002 is incomplete: it has no manifest\.json"
    ):
        convert_command(["to-hf", str(manifest.parent), str(tmp_path / "refused")])


def weights_of(folder: Path) -> bytes:
    return (folder / "weights.safetensors").read_bytes()


def test_final_weights_are_kept_until_a_resumed_run_takes_a_step(
    tmp_path: Path,
) -> None:
    """Oracle: the files: kept without further steps, moved aside otherwise."""
    run = tmp_path / "run"
    config = with_checkpoints(make_config(SingleConfig(), 1, steps=2), run)
    config.checkpoint.final_weights = True
    for _ in range(3):
        run_ranks(1, train_to_the_end, config)
    first = weights_of(run / "weights")
    longer = dataclasses.replace(
        config, train=dataclasses.replace(config.train, steps=4)
    )
    run_ranks(1, run_until, longer, 4)
    assert not (run / "weights").exists()
    run_ranks(1, train_to_the_end, longer)
    assert weights_of(run / "weights-1") == first != weights_of(run / "weights")
    assert sorted(path.name for path in run.glob("weights*")) == [
        "weights",
        "weights-1",
    ]


def run_without_room_for_weights(config: Config) -> None:
    def refuse(*_: Any) -> None:
        raise ConfigError("no room")

    final_weights.save_weights = refuse
    with pytest.raises(ConfigError, match="no room"):
        Run(Trainer(config)).run()


def test_results_are_kept_if_weights_cannot_be_written(tmp_path: Path) -> None:
    """Oracle: the summary of all steps, although the run ends with an error."""
    config = with_final_weights(make_config(SingleConfig(), 1, steps=2), tmp_path)
    run_ranks(1, run_without_room_for_weights, config)
    assert "2 of 2; all steps done" in (tmp_path / "summary.md").read_text(
        encoding="utf-8"
    )


def weights_before_the_sample(config: Config, weights: Path) -> list[str]:
    names: list[str] = []
    run_module.sample_text = lambda trainer: names.extend(sorted(os.listdir(weights)))
    Run(Trainer(config)).run()
    return names


def test_weights_are_saved_before_a_sample_is_generated(tmp_path: Path) -> None:
    """Oracle: the folder at the start of sampling, which may take minutes and be interrupted."""
    config = with_final_weights(make_config(SingleConfig(), 1, steps=1), tmp_path)
    names = run_ranks(1, weights_before_the_sample, config, tmp_path / "weights")[0]
    assert names == ["checksums.json", "weights.safetensors"]
