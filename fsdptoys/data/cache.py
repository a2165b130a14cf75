"""Where this machine keeps what can be made again from the data."""

import os
from pathlib import Path


def cache_folder(chosen: str | None) -> Path:
    """The folder that was chosen, or ``fsdptoys/data`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(chosen or f"{home}/fsdptoys/data").expanduser()
