"""TensorBoard: a scalar for each number of a step, the settings as text, and the plot of the loss.

A resumed run repeats the steps after its checkpoint; ``purge_step`` makes TensorBoard discard them from older event
files.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from .config import TENSORBOARD_FOLDER
from .results import RunResults
from .step import StepMetrics
from .writers import RunStart

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardWriter:
    """Writes event files into ``tensorboard/`` of the run directory."""

    label = "TensorBoard"

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    def start(self, run: RunStart) -> None:
        """Open an event file, and write the settings and the environment as text."""
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        done = run.done
        self._writer = SummaryWriter(run.run_dir / TENSORBOARD_FOLDER, purge_step=done + 1 if done else None)
        for tag, tree in (("config", run.config_tree), ("environment", run.environment)):
            text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
            # In Markdown, lines with four leading spaces are a code block.
            self._writer.add_text(tag, "".join(f"    {line}\n" for line in text.splitlines()), done)

    def step(self, metrics: StepMetrics) -> None:
        """Write the numbers of ``metrics.jsonl``, under the same names."""
        assert self._writer is not None
        for name, value in metrics.numbers().items():
            if name != "step":
                self._writer.add_scalar(name, value, metrics.step)

    def flush(self) -> None:
        """Flush all events to the system."""
        assert self._writer is not None
        self._writer.flush()

    def finish(self, results: RunResults, stop_reason: str, picture: Path) -> None:
        """Write the stop reason and the plot of the loss."""
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
