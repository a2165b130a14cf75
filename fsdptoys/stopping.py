"""Why a run takes no further step, which all ranks must agree on."""

from collections.abc import Sequence
from dataclasses import dataclass

from .config import TrainConfig
from .signals import STOP_SIGNALS


@dataclass(frozen=True)
class Stop:
    """Why a run takes no further step, agreed by all ranks."""

    reason: str
    """As the end of "15 of 20 steps; …"."""
    signal: bool = False
    """Whether somebody outside wants the process to end soon."""
    gave_up: bool = False
    """Whether going on made no sense."""


def agreed_stop(
    train: TrainConfig, votes: Sequence[float], *, skipped: bool, in_a_row: int, in_all: int
) -> Stop | None:
    """Why to stop after a step, if any rank has a reason.

    Args:
        train: for its limits.
        votes: how many ranks received each of ``STOP_SIGNALS``, and how many are out of time.
        skipped: whether the step made no update.
        in_a_row: steps without update one after the other, up to this one.
        in_all: steps without update in the whole run.
    """
    for number, ranks in zip(STOP_SIGNALS, votes, strict=False):
        if ranks:
            return Stop(f"{number.name} received", signal=True)
    for key, limit, count, how in (
        ("max_skipped_in_a_row", train.max_skipped_in_a_row, in_a_row, "in a row"),
        ("max_skipped", train.max_skipped, in_all, "in all"),
    ):
        if skipped and count >= limit:
            return Stop(
                f"{count} steps {how} had a loss or gradients that are not finite (train.{key}={limit})", gave_up=True
            )
    return Stop(f"train.max_seconds={train.max_seconds:g} reached") if votes[-1] else None
