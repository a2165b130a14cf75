"""TensorBoard: a scalar for every number of a step, the settings as text, and the picture of the loss.

Where a run goes on from a checkpoint, the steps after it are done again: a mark in the new event file has TensorBoard
forget what the older files say of them (``purge_step``).
"""

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from .config import TENSORBOARD_FOLDER
from .results import (
    RunResults,
)
from .step import StepMetrics
from .writer import (
    Beginning,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardWriter:
    """Writes event files into ``tensorboard/`` of the run directory."""

    label = "TensorBoard"

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    def start(self, beginning: Beginning) -> None:
        """Open an event file, and write the settings and the environment as text."""
        from torch.utils.tensorboard import SummaryWriter  # a second to import

        done = beginning.done
        self._writer = SummaryWriter(beginning.run_dir / TENSORBOARD_FOLDER, purge_step=done + 1 if done else None)
        for tag, tree in (("config", beginning.config_tree), ("environment", beginning.environment)):
            text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
            # Markdown shows lines that begin with four spaces as they are.
            self._writer.add_text(tag, "".join(f"    {line}\n" for line in text.splitlines()), done)

    def step(self, metrics: StepMetrics) -> None:
        """Write the numbers of ``metrics.jsonl``, under its names."""
        assert self._writer is not None
        for name, value in metrics.numbers().items():
            if name != "step":
                self._writer.add_scalar(name, value, metrics.step)

    def flush(self) -> None:
        """Hand every event to the system."""
        assert self._writer is not None
        self._writer.flush()

    def finish(self, results: RunResults, stop_reason: str, picture: Path) -> None:
        """Write how the run ended, and its picture."""
        from matplotlib.image import imread

        assert self._writer is not None
        self._writer.add_text("ended", stop_reason, results.steps)
        self._writer.add_image("loss_curve", imread(picture)[..., :3], results.steps, dataformats="HWC")
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
