"""What ranks that failed left behind, for whoever looks for the cause: who hung, where each was, its collectives."""

from collections.abc import Mapping
from pathlib import Path

from .failures import FirstFailure
from .flight_recorder import keep_recordings
from .heartbeat import HEARTBEATS_FOLDER, MOST_RANKS_TOLD, last_signs, ranks_in_words, sign_of
from .worker import remembered_run_dir


def hung_ranks(first: FirstFailure, pids: Mapping[int, int], folder: Path) -> list[str]:
    """A line for each rank that others waited for in vain, as far as can be told.

    Args:
        first: what made the workers fail.
        pids: the ranks of this machine.
        folder: the launcher's.
    """
    heartbeats = (remembered_run_dir(folder) or folder) / HEARTBEATS_FOLDER
    # Where several ended in silence, some of them may have waited for the one that hung.
    what = "it hung" if first.timed_out and len(first.hung) == 1 else "it hung, or waited for one that did"
    lines = []
    for rank in first.hung[:MOST_RANKS_TOLD]:
        sign = sign_of(heartbeats, rank, pids[rank])
        last = f"last sign {sign}" if sign else "without any sign that is known"
        lines.append(f"rank {rank} raised nothing and had to be ended: {what}, {last}")
    if more := first.hung[MOST_RANKS_TOLD:]:
        lines.append(f"so did {ranks_in_words(list(more))}")
    return lines


def remains(first: FirstFailure, pids: Mapping[int, int], folder: Path) -> str:
    """What follows the failure's own words: who hung, where all ranks were if it was silent, and where to read on.

    Args:
        first, pids, folder: as for ``hung_ranks``. Recordings of collectives are moved from the folder to the run's.
    """
    told = "".join(f"\n{line}" for line in hung_ranks(first, pids, folder))
    run_dir = remembered_run_dir(folder)
    if run_dir is None:
        return told
    if first.silent:
        signs = last_signs(run_dir / HEARTBEATS_FOLDER, pids)
        told += f"; {signs}" if signs else ""
    kept = keep_recordings(folder, run_dir)
    return f"{told}\n{kept}" if kept else told
