"""Settings of what is kept of a run, so that it can go on, and of what it leaves behind of its model."""

from dataclasses import dataclass
from enum import Enum

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import MOST_SECONDS, MOST_STEPS, check_at_most

RESUME_WORDS = ("never", "auto", "must")


class Form(Enum):
    """How a checkpoint's tensors are laid out; either is loaded by any number of ranks."""

    sharded = "sharded"
    """Every rank writes what it holds."""
    full = "full"
    """Rank 0 writes whole tensors, one after the other, into one file."""


@dataclass
class CheckpointConfig:
    """What is kept, and from what a run goes on."""

    folder: str | None = None
    """Where checkpoints go: a path, or a URL that fsspec knows; null for ``checkpoints`` in the run directory."""
    every: int = 0
    """Save after every so many steps, and after the last; 0 for none but those of ``on_signal``."""
    on_signal: bool = True
    """Save when a signal (SIGTERM, SIGUSR1) ends the run."""
    keep: int = 3
    """Newest checkpoints that are kept; older ones are deleted."""
    keep_every: int = 0
    """Keep those of every so many steps for good; 0 for none."""
    async_save: bool = False
    """Stop the steps only to copy to host memory, and write in the background."""
    form: Form = Form.sharded
    """How a checkpoint's tensors are laid out."""
    timeout_seconds: float = 7200.0
    """A save, or reading a checkpoint, that keeps one rank waiting for another for longer ends the run."""
    resume: str = "never"
    """``auto``: from the newest whole checkpoint, if there is one; ``must``: or refuse; or a checkpoint's folder."""
    final_weights: bool = False
    """At the end of the run write the trained weights into the run directory; ``fsdptoys convert to-hf`` reads them."""

    def __post_init__(self) -> None:
        """Check each value by itself."""
        check_at_most("checkpoint", self, every=MOST_STEPS, keep=MOST_STEPS, keep_every=MOST_STEPS)
        for name, bound in (("every", 0), ("keep", 1), ("keep_every", 0)):
            value = getattr(self, name)
            if value < bound:
                raise ConfigError(f"checkpoint.{name}={value} must be at least {bound}; set checkpoint.{name}={bound}")
        if not 0 < self.timeout_seconds <= MOST_SECONDS:
            raise ConfigError(
                f"checkpoint.timeout_seconds={self.timeout_seconds} must be above 0 and at most "
                f"{MOST_SECONDS}; set checkpoint.timeout_seconds=7200"
            )
        for name in ("folder", "resume"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise ConfigError(f"checkpoint.{name}={value!r} must not be empty; leave it out")
        if self.keep_every and not self.every:
            raise ConfigError(
                f"checkpoint.keep_every={self.keep_every} keeps some of the checkpoints of checkpoint.every, which is "
                f"0; set checkpoint.every={self.keep_every}"
            )
        if self.keep_every and self.keep_every % self.every:
            raise ConfigError(
                f"checkpoint.keep_every={self.keep_every} must be a multiple of checkpoint.every={self.every}; set "
                f"checkpoint.keep_every={self.every * max(1, round(self.keep_every / self.every))}"
            )

    @property
    def resumes(self) -> bool:
        """Whether the run may go on from a checkpoint."""
        return self.resume != "never"
