"""Environment variables of a script's child processes, which import this checkout and the packages
carried with it."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def child_environment(**variables: str) -> dict[str, str]:
    """This process's variables with this checkout first in ``PYTHONPATH``, before the other
    folders.

    On a machine without network, packages installed with ``pip install --target FOLDER`` are found
    through ``PYTHONPATH`` alone.

    Args:
        variables: added, in place of present ones.
    """
    folders = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    path = os.pathsep.join(dict.fromkeys(filter(None, folders)))
    return os.environ | {"PYTHONPATH": path} | variables
