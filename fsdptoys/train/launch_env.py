"""Environment variables and files that the launcher shares with the ranks it starts."""

import os
from pathlib import Path

from fsdptoys.utils.atomic_write import write_atomically

LAUNCHED = "FSDPTOYS_LAUNCHED"
"""The launcher's process id, set for the workers it starts."""

LAUNCH_FOLDER = "FSDPTOYS_LAUNCH_FOLDER"
"""The launcher's folder on this machine, removed when the launcher ends."""

RESTARTS = "FSDPTOYS_RESTARTS"
"""How many times the launcher has restarted the workers."""


def launch_folder() -> Path | None:
    """The launcher's folder on this machine; None under another launcher or without one."""
    named = os.environ.get(LAUNCH_FOLDER)
    return Path(named) if named else None


def restart_count() -> int:
    """How many times the ranks have been restarted, by our launcher or by torchrun."""
    # torchrun counts only failures on this machine, although a failure on another node restarts all workers too.
    count = os.environ.get(RESTARTS) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdecimal() else 0


def remember_run_dir(path: Path) -> None:
    """Record the run directory for the launcher and restarted workers; at least one rank per node must call it."""
    folder = launch_folder()
    if folder is not None:
        write_atomically(folder / "run_dir", str(path.absolute()))


def remembered_run_dir(folder: Path | None = None) -> Path | None:
    """The run directory recorded in the launcher's folder, by default that of this worker; None if there is none."""
    folder = folder or launch_folder()
    try:
        return Path((folder / "run_dir").read_text()) if folder is not None else None
    except FileNotFoundError:
        return None
