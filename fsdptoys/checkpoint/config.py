"""Settings of checkpoints, resuming and final weights."""

from dataclasses import dataclass
from enum import Enum

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import MOST_SECONDS, MOST_STEPS, above, at_least
from fsdptoys.utils.options import Effect, check_options, option

RESUME_WORDS = ("never", "auto", "must")


class Form(Enum):
    """Layout of a checkpoint's tensors; any number of ranks can load either."""

    sharded = "sharded"
    """Every rank writes its shards."""
    full = "full"
    """Rank 0 writes full tensors, one by one, into one file."""


@dataclass
class CheckpointConfig:
    """Checkpoints to write and to resume from."""

    folder: str | None = option(None, effect=Effect.none)
    """Checkpoint folder: a path or an fsspec URL; null for ``checkpoints`` in the run directory."""
    every: int = option(
        0,
        at_least(0, MOST_STEPS),
        effect=Effect.none,
        alias=(
            "save_steps save_every save_interval checkpoint_interval ckpt_freq checkpointing_steps"
        ),
    )
    """Save every N steps and after the last step; 0 saves only on signals (see ``on_signal``)."""
    on_signal: bool = option(True, effect=Effect.none)
    """Save when a signal (SIGTERM, SIGUSR1, Ctrl-C) ends the run."""
    keep: int = option(
        3,
        at_least(1, MOST_STEPS),
        effect=Effect.none,
        alias="save_total_limit keep_last_n",
    )
    """Number of newest checkpoints to keep; older ones are deleted."""
    keep_every: int = option(0, at_least(0, MOST_STEPS), effect=Effect.none)
    """Also keep every checkpoint whose step is a multiple of N; 0 for none."""
    async_save: bool = option(False, effect=Effect.none)
    """Pause training only to copy tensors to host memory, and write in the background."""
    form: Form = option(Form.sharded, effect=Effect.none)
    """Layout of a checkpoint's tensors."""
    timeout_seconds: float = option(7200.0, above(0, MOST_SECONDS), effect=Effect.none)
    """End the run if one rank waits longer than this for another while saving or loading a
    checkpoint."""
    resume: str = option(
        "never",
        effect=Effect.none,
        alias="resume_from_checkpoint resume_from load_checkpoint ckpt_path",
    )
    """``never``; ``auto``: from the newest complete checkpoint, if any; ``must``: fail without one;
    or a folder."""
    final_weights: bool = option(False, effect=Effect.none)
    """Write the trained weights into the run directory at the end; ``fsdptoys convert to-hf`` reads
    them."""

    def __post_init__(self) -> None:
        check_options("checkpoint", self)
        for name in ("folder", "resume"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise ConfigError(
                    f"checkpoint.{name}={value!r} must not be empty; leave it out"
                )
        if self.keep_every and not self.every:
            raise ConfigError(
                f"checkpoint.keep_every={self.keep_every} keeps some of the checkpoints of "
                f"checkpoint.every, which is 0; set checkpoint.every={self.keep_every}"
            )
        if self.keep_every and self.keep_every % self.every:
            raise ConfigError(
                f"checkpoint.keep_every={self.keep_every} must be a multiple of "
                f"checkpoint.every={self.every}; set "
                f"checkpoint.keep_every={self.every * max(1, round(self.keep_every / self.every))}"
            )

    @property
    def resumes(self) -> bool:
        """Whether the run may resume from a checkpoint."""
        return self.resume != "never"
