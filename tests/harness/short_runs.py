"""Runs of three steps in this process, with a checkpoint after each."""

import shlex
from pathlib import Path

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from tests.harness.ranks import run_ranks

WORDS = shlex.split(
    "experiment=null parallel=single train.seq_len=32 train.steps=4 metrics.console=none"
)


def take_three_steps(config: Config) -> None:
    Run(Trainer(config)).run()


def train_run(folder: Path) -> None:
    """Train for three steps, with a checkpoint after each."""
    config = compose_config(
        [*WORDS, f"metrics.run_dir={folder}", "checkpoint.every=1", "train.steps=3"]
    )
    config.validate(1, "cpu")
    run_ranks(1, take_three_steps, config)
