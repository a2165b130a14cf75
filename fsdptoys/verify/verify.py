"""Train a model in a plain loop and under every row, and say where they differ.

Each row has fresh ranks, forked from this process on a CPU: a row that fails or hangs takes no
other with it. A reference is shared by all rows that take the same global batches in the same
pieces.
"""

import copy
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.utils.text import one_line

from .judge import Figures, Outcome, Verdict, judge
from .plain import Split
from .progress import Progress
from .ranks import run_ranks
from .reference import Reference, train_reference
from .rows import Row, Selection
from .train_row import save_checkpoints, silence, train_row

GLOBAL_BATCH = 8
"""Sequences of a step; fewer where the ranks do not divide it."""
ROW_SECONDS = 600.0
"""Longest time of a row."""
USUAL = {
    "data": "synthetic",
    "data.ragged": "true",
    "train.seq_len": "64",
    "train.steps": "5",
    "train.max_grad_norm": "0.5",
    "train.eval_every": "0",
    "optim.lr": "1e-3",
    "optim.warmup_steps": "2",
    "metrics.console": "none",
}
"""Settings of every row, unless the command line has others."""
OF_REFERENCE = ("model", "optim", "data", "train", "parallel.param_dtype")
"""Settings of a row that its reference has too, by the beginnings of their keys."""
SAVED_STEP = 2


@dataclass(frozen=True)
class Request:
    """What to verify."""

    title: str
    overrides: list[str]
    """They choose the model and fix settings of every row."""
    selection: Selection
    device: str
    notes: list[str] = field(default_factory=list)
    """Sentences on the model, for the report."""


@dataclass
class RowResult:
    """A row and what came of it."""

    row: Row
    verdict: Verdict
    seconds: float = 0.0


@dataclass
class Report:
    """All rows."""

    request: Request
    config: Config
    """Of the plain loop."""
    results: list[RowResult]

    @property
    def status(self) -> int:
        """Exit status: 1 if sharding has changed something, or a row has failed."""
        return int(any(result.verdict.outcome.is_fault for result in self.results))


def verify(request: Request) -> Report:
    """Train all rows.

    Raises:
        ConfigError: if the settings cannot be trained in one process either.
    """
    overrides = usual_overrides(request.overrides, request.device)
    base = compose_config([*overrides, "parallel=single"])
    base.validate(1, request.device)
    progress = Progress(len(request.selection.rows))
    results = []
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(overrides, request.device, Path(folder), progress)
        for row in request.selection.rows:
            progress.begin(row.name)
            verdict = runner.run(row)
            results.append(RowResult(row, verdict, progress.end(verdict.text)))
    return Report(request, base, results)


def usual_overrides(overrides: Sequence[str], device: str) -> list[str]:
    """Return the overrides of every row: the usual ones, then those of the command line."""
    keys = {word.partition("=")[0].lstrip("+") for word in overrides}
    usual = [
        f"{key}={value}"
        for key, value in USUAL.items()
        if key not in keys and not (key.startswith("data") and "data" in keys)
    ]
    return [*usual, *overrides, f"launch.device={device}"]


class Runner:
    """Trains rows one after another.

    Args:
        overrides: of every row.
        device: type of the devices.
        folder: for run directories and what ranks print.
        progress: told that time passes.
    """

    def __init__(
        self, overrides: Sequence[str], device: str, folder: Path, progress: Progress
    ) -> None:
        self._overrides = list(overrides)
        self._device = device
        self._folder = folder
        self._references: dict[tuple[Split, tuple[str, ...]], Reference] = {}
        self._run = partial(
            run_ranks,
            device=device,
            start="fork" if device == "cpu" else "spawn",
            prepare=partial(silence, folder),
            limit_seconds=ROW_SECONDS,
            while_waiting=progress.beat,
        )

    def run(self, row: Row) -> Verdict:
        """Train a row and compare it."""
        try:
            config, split = self.configure(row.overrides, row.ranks)
        except ConfigError as refusal:
            return Verdict(Outcome.refused, str(refusal))
        try:
            reference = self.reference(row, split)
        except (ConfigError, RuntimeError, TimeoutError) as error:
            return Verdict(
                Outcome.failed, f"the plain loop: {explain(str(error)).sentence}"
            )
        try:
            if row.saved_by is not None:
                self._save(row, config)
            tensors = reference.trajectory.tensors
            in_folder = row.saved_by is not None
            figures = self._run(row.ranks, train_row, config, tensors, in_folder)[0]
        except ConfigError as refusal:  # of the run that saves a checkpoint
            return Verdict(Outcome.refused, str(refusal))
        except (RuntimeError, TimeoutError) as error:
            return explain(str(error))
        assert isinstance(figures, Figures)
        return judge(figures, reference, SAVED_STEP + 1 if in_folder else 1)

    def configure(self, overrides: Sequence[str], ranks: int) -> tuple[Config, Split]:
        """Compose and check the configuration of ranks, and divide the global batch among them."""
        values = {word.partition("=")[0]: word for word in self._overrides}
        values |= {word.partition("=")[0]: word for word in overrides}
        config = compose_config(list(values.values()))
        copied = copy.deepcopy(config)
        copied.mesh.resolve(ranks, ranks)
        data_ranks = copied.parallel.axes(ranks, copied.mesh).data_ranks
        pieces = data_ranks * config.train.grad_accum
        if not any(word.startswith("train.batch_size=") for word in self._overrides):
            config.train.batch_size = max(1, GLOBAL_BATCH // pieces)
        config.validate(ranks, self._device)
        split = Split(data_ranks, config.train.grad_accum, config.train.batch_size)
        return config, split

    def reference(self, row: Row, split: Split) -> Reference:
        """Return the plain loop's numbers for a row, trained once."""
        overrides = tuple(
            word for word in row.overrides if word.startswith(OF_REFERENCE)
        )
        key = split, overrides
        if key not in self._references:
            config, _ = self.configure([*overrides, "parallel=single"], 1)
            device = torch.device(self._device)
            self._references[key] = self._run(
                1, train_reference, config, split, device
            )[0]
        return self._references[key]

    def _save(self, row: Row, config: Config) -> None:
        """Train the run from which a row resumes, and make the row resume from it."""
        assert row.saved_by is not None
        ranks, overrides = row.saved_by
        saved, _ = self.configure(overrides.split(), ranks)
        saved.metrics.run_dir = str(self._folder / f"{row.name}-saved")
        saved.checkpoint.every = SAVED_STEP
        saved.checkpoint.keep = saved.train.steps
        self._run(ranks, save_checkpoints, saved)
        checkpoints = Path(saved.metrics.run_dir, "checkpoints")
        config.metrics.run_dir = str(self._folder / row.name)
        config.checkpoint.resume = str(checkpoints / f"step-{SAVED_STEP:08d}")


def explain(text: str) -> Verdict:
    """Return the verdict on a row whose ranks raised an exception, from its traceback."""
    lines = [line for line in text.splitlines() if line.strip()]
    raised = [
        line
        for line in lines
        if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit)\b", line)
    ]
    last = raised[-1] if raised else lines[-1]
    name, _, message = last.partition(": ")
    if name.endswith("ConfigError"):
        return Verdict(Outcome.refused, message)
    rank = re.match(r"rank \d+", text)
    where = f"{rank[0]}: " if rank and raised else ""
    return Verdict(Outcome.failed, where + one_line(last))
