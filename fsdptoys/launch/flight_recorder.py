"""Keep flight recordings (each rank's last collectives before a hang) with the run.

torch records under NCCL, and its ``torchfrtrace`` compares the ranks; torch_npu records under HCCL. Setting names are
from torch 2.7.1 and 2.13.0 and torch_npu 2.13.0. Not tested on a GPU or an NPU.
"""

import contextlib
import os
import shutil
from pathlib import Path

FLIGHT_RECORDER_FOLDER = "flight_recorder"
"""Subfolder of the launcher's folder and, after a failure, of the run directory."""

FILE_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Variable with the prefix of the files, in newer and older torch."""

HCCL_FILE_NAME = "TORCH_HCCL_DEBUG_INFO_TEMP_FILE"
"""The same in torch_npu."""


def name_recordings(folder: Path) -> None:
    """Direct recordings to the launcher's folder if the environment enables them and names no other place."""
    place = folder / FLIGHT_RECORDER_FOLDER
    place.mkdir()
    if os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT") == "1" and not any(name in os.environ for name in FILE_NAMES):
        os.environ[FILE_NAMES["TORCH_FR_BUFFER_SIZE" not in os.environ]] = f"{place}/rank_"
    if os.environ.get("TORCH_HCCL_DUMP_ON_TIMEOUT") == "1":
        os.environ.setdefault(HCCL_FILE_NAME, f"{place}/rank_")


def keep_recordings(folder: Path, run_dir: Path) -> str | None:
    """Move recordings from the launcher's folder into the run directory; return a line about them, or None."""
    recordings = list((folder / FLIGHT_RECORDER_FOLDER).iterdir())
    if not recordings:
        return None
    kept = run_dir / FLIGHT_RECORDER_FOLDER
    kept.mkdir(exist_ok=True)
    for path in recordings:
        with contextlib.suppress(OSError):  # the move below raises it
            (kept / path.name).unlink(missing_ok=True)  # a move across file systems would write through a link
        shutil.move(path, kept / path.name)
    message = f"the last collectives of each rank are in {kept}"
    return message if HCCL_FILE_NAME in os.environ else f"{message}; torchfrtrace {kept} compares them"
