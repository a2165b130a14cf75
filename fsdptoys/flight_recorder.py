"""What NCCL's flight recorder leaves when a collective hangs: each rank's last collectives, kept with the run.

It is torch that records and writes; ``torchfrtrace``, which comes with it, compares the ranks. The names of its
settings were read in torch 2.7.1 and 2.13.0; nothing of this has been tried on a GPU.
"""

import os
import shutil
from pathlib import Path

FLIGHT_RECORDER_FOLDER = "flight_recorder"
"""In the launcher's folder, and after a failure in the run directory."""

FILE_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""How the prefix of the files is set, in newer and older torch."""


def name_recordings(folder: Path) -> None:
    """Let recordings land in the launcher's folder, if the environment asks for any and names no other place."""
    place = folder / FLIGHT_RECORDER_FOLDER
    place.mkdir()
    if os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT") == "1" and not any(name in os.environ for name in FILE_NAMES):
        os.environ[FILE_NAMES["TORCH_FR_BUFFER_SIZE" not in os.environ]] = f"{place}/rank_"


def keep_recordings(folder: Path, run_dir: Path) -> str | None:
    """Move recordings from the launcher's folder into the run directory, and say so; None where there are none."""
    recordings = list((folder / FLIGHT_RECORDER_FOLDER).iterdir())
    if not recordings:
        return None
    kept = run_dir / FLIGHT_RECORDER_FOLDER
    kept.mkdir(exist_ok=True)
    for path in recordings:
        shutil.move(path, kept / path.name)
    return f"the last collectives of each rank are in {kept}; torchfrtrace {kept} compares them"
