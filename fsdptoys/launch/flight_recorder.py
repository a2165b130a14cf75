"""What a flight recorder leaves when a collective hangs: each rank's last collectives, kept with the run.

It is torch that records and writes under NCCL, where ``torchfrtrace``, which comes with it, compares the ranks; and
torch_npu under HCCL. The names of their settings were read in torch 2.7.1 and 2.13.0 and in torch_npu 2.13.0; nothing
of this has been tried on a GPU or an NPU.
"""

import contextlib
import os
import shutil
from pathlib import Path

FLIGHT_RECORDER_FOLDER = "flight_recorder"
"""In the launcher's folder, and after a failure in the run directory."""

FILE_NAMES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""How the prefix of the files is set, in newer and older torch."""

HCCL_FILE_NAME = "TORCH_HCCL_DEBUG_INFO_TEMP_FILE"
"""And by torch_npu."""


def name_recordings(folder: Path) -> None:
    """Let recordings land in the launcher's folder, if the environment asks for any and names no other place."""
    place = folder / FLIGHT_RECORDER_FOLDER
    place.mkdir()
    if os.environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT") == "1" and not any(name in os.environ for name in FILE_NAMES):
        os.environ[FILE_NAMES["TORCH_FR_BUFFER_SIZE" not in os.environ]] = f"{place}/rank_"
    if os.environ.get("TORCH_HCCL_DUMP_ON_TIMEOUT") == "1":
        os.environ.setdefault(HCCL_FILE_NAME, f"{place}/rank_")


def keep_recordings(folder: Path, run_dir: Path) -> str | None:
    """Move recordings from the launcher's folder into the run directory, and say so; None where there are none."""
    recordings = list((folder / FLIGHT_RECORDER_FOLDER).iterdir())
    if not recordings:
        return None
    kept = run_dir / FLIGHT_RECORDER_FOLDER
    kept.mkdir(exist_ok=True)
    for path in recordings:
        with contextlib.suppress(OSError):  # the move says what is wrong
            (kept / path.name).unlink(missing_ok=True)  # across file systems a link would be written through
        shutil.move(path, kept / path.name)
    told = f"the last collectives of each rank are in {kept}"
    return told if HCCL_FILE_NAME in os.environ else f"{told}; torchfrtrace {kept} compares them"
