"""Whether somebody writes a run directory now: by its lock, and, where locks do not reach, by its ranks' signs."""

import time
from pathlib import Path

from fsdptoys.heartbeat import HEARTBEATS_FOLDER, Sign, read_heartbeats
from fsdptoys.metrics.lock import is_locked

FRESH_SECONDS = 120.0
"""Where locks do not reach, a run whose ranks gave a sign within this time still goes on."""


def is_written(path: Path) -> bool:
    """Whether a run goes on there, as far as this machine can tell."""
    now = time.time()
    return is_locked(path) or any(
        abs(now - sign.time) < FRESH_SECONDS and sign.state() != "has ended" for sign in newest_signs(path).values()
    )


def newest_signs(path: Path) -> dict[int, Sign]:
    """The last sign of each rank of the newest start in a run directory."""
    signs = read_heartbeats(path / HEARTBEATS_FOLDER)
    newest = max(signs.values(), key=lambda sign: sign.time, default=None)
    return {rank: sign for rank, sign in signs.items() if newest is not None and sign.start == newest.start}
