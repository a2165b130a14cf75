"""TODO."""

import os
from pathlib import Path

from fsdptoys.utils.atomic_write import write_atomically

LAUNCHED = "FSDPTOYS_LAUNCHED"
"""The launcher's process id, for workers that it starts; its command has printed already what it found."""


LAUNCH_FOLDER = "FSDPTOYS_LAUNCH_FOLDER"
"""The launcher's folder on this machine, which ends with it."""


RESTARTS = "FSDPTOYS_RESTARTS"
"""How many times the launcher has started the workers again."""


def launch_folder() -> Path | None:
    """The launcher's folder on this machine; None under another launcher, or none."""
    named = os.environ.get(LAUNCH_FOLDER)
    return Path(named) if named else None


def restart_count() -> int:
    """How many times the ranks have been started again, by our launcher or by torchrun."""
    # torch counts the failures on this machine alone; when another one's worker fails, all start again nevertheless.
    told = os.environ.get(RESTARTS) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(told) if told.isdecimal() else 0


def remember_run_dir(path: Path) -> None:
    """Tell the launcher, and workers that are started after this one, where the run directory is.

    Every rank may tell it, and one of each machine has to.
    """
    folder = launch_folder()
    if folder is not None:
        write_atomically(folder / "run_dir", str(path.absolute()))


def remembered_run_dir(folder: Path | None = None) -> Path | None:
    """The run directory that :func:`remember_run_dir` was told.

    Args:
        folder: the launcher's; None for that of this worker.
    """
    folder = folder or launch_folder()
    try:
        return Path((folder / "run_dir").read_text()) if folder is not None else None
    except FileNotFoundError:
        return None
