"""Options of names in lists: from the command line and files, saved with a run, and left out where
older runs have none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdptoys import register
from fsdptoys.config.compose import compose_config
from fsdptoys.config.declared_options import declared_options
from fsdptoys.config.saved import read_config
from fsdptoys.errors import ConfigError
from fsdptoys.metrics import StepMetrics, Writer, WriterConfig
from fsdptoys.metrics.registry import build_writers
from fsdptoys.utils.bounds import at_least
from fsdptoys.utils.options import Effect, option
from tests.harness.recording import STEP, open_recorder


class LinesConfig(WriterConfig):
    """Writes lines into a file."""

    file: str = "lines.txt"
    every: int = option(1, at_least(1), effect=Effect.none)

    def build(self) -> Writer:
        """Return the writer."""
        return Lines(self)


class Lines(Writer):
    """Has ``step`` only; other hooks do nothing."""

    label = "Lines"

    def __init__(self, config: LinesConfig) -> None:
        self._config = config
        self.lines: list[int] = []

    def step(self, metrics: StepMetrics) -> None:
        """Write the step's number."""
        if metrics.step % self._config.every == 0:
            with open(self._config.file, "a") as file:
                file.write(f"{metrics.step}\n")


@pytest.fixture(autouse=True)
def lines() -> Iterator[None]:
    """Register the writer for a test."""
    forget = register.snapshot()
    register.writer("lines")(LinesConfig)
    yield
    forget()


def compose(*overrides: str) -> dict[str, Any]:
    return compose_config(["experiment=null", *overrides]).to_dict()


def test_chosen_names_have_their_options_in_the_configuration() -> None:
    """Oracle: the dataclasses' defaults, and the values typed; others have none."""
    tree = compose("metrics.writers=[csv,lines,mlflow]", "writers.lines.every=3")
    assert tree["writers"] == {
        "csv": {},
        "lines": {"file": "lines.txt", "every": 3},
        "mlflow": {"tracking_uri": None, "experiment": "fsdptoys", "run_name": None},
    }
    assert compose()["writers"] == compose()["callbacks"] == {}


def test_registered_writer_gets_steps_and_its_options(tmp_path: Path) -> None:
    """Oracle: the numbers of the steps that it writes; hooks that it lacks do nothing."""
    config = compose_config(
        [
            "metrics.writers=[lines]",
            f"writers.lines.file={tmp_path / 'here'}",
            "writers.lines.every=2",
        ]
    )
    (writer,) = build_writers(config.metrics, config.writers)
    assert isinstance(writer, Lines)
    with open_recorder(
        run_dir=tmp_path / "run", writers=["lines"], options=config.writers
    ) as recorder:
        for step in (1, 2, 3, 4):
            recorder.step(STEP.__class__(**{**vars(STEP), "step": step}))
        recorder.offsets()
        recorder.finish("done")
    assert (tmp_path / "here").read_text() == "2\n4\n"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["writers.lines.every=2"],
            "writers.lines.every=2 has no effect unless metrics.writers names lines; set "
            "metrics.writers=[lines] or leave it out",
        ),
        (
            ["metrics.writers=[lines]", "writers.lines.every=0"],
            "writers.lines.every=0 must be at least 1; set writers.lines.every=1",
        ),
        (
            ["metrics.writers=[lines]", "writers.lime.every=2"],
            "writers.lime.every=2 names a key that does not exist; did you mean "
            "writers.lines.every=2?",
        ),
        (
            ["writers.mlflo.experiment=x"],
            "writers.mlflo.experiment=x names a key that does not exist; did you mean "
            "writers.mlflow.experiment=x?",
        ),
        (
            ["metrics.writers=[lins]"],
            "metrics.writers names lins, which is none of tensorboard, wandb, csv, mlflow, "
            "trackio, lines; did you mean metrics.writers=[lines]?",
        ),
    ],
)
def test_mistakes_are_one_sentence(overrides: list[str], sentence: str) -> None:
    """Oracle: the expected message."""
    with pytest.raises(ConfigError) as error:
        compose(*overrides)
    assert str(error.value) == sentence


def test_run_without_these_sections_or_this_code_is_read(tmp_path: Path) -> None:
    """Oracle: ``config.yaml`` as an older version and as other code wrote it."""
    tree = compose("metrics.writers=[csv]")
    for key in ("loss", "writers", "callbacks"):
        del tree[key]
    del tree["train"]["callbacks"]
    config = read_config(tree, "config.yaml")
    assert (config.loss.name, config.writers, config.callbacks) == (
        "cross_entropy",
        {},
        {},
    )
    other = yaml.safe_load(yaml.safe_dump(compose("metrics.writers=[csv]")))
    other["metrics"]["writers"] = ["csv", "unknown"]
    other["train"]["callbacks"] = ["unknown"]
    other["writers"]["unknown"] = {"key": 1}
    config = read_config(other, "config.yaml")
    assert (config.metrics.writers, config.train.callbacks) == (["csv"], [])


def test_options_of_writers_change_no_losses() -> None:
    """Oracle: the declared effect, also of a plain field."""
    options = declared_options()
    assert options["writers.lines.file"].effect is Effect.none
    assert options["writers.mlflow.experiment"].effect is Effect.none
