"""One save by all ranks: either all of it is committed, or it is discarded and training continues.

1. Rank 0 makes the working folder.
2. Every rank writes its tensors and facts; each file is synced to disk and summed while it is
   written.
3. Rank 0 gathers sizes and checksums, or errors, and commits the folder with a manifest (see
   ``retention``).
4. The verdict is broadcast. Then rank 0 deletes old checkpoints.

If the disk is full, old checkpoints beyond ``checkpoint.keep`` are deleted and the save is retried
once.
"""

import errno
import functools
import os
from collections.abc import Callable
from contextlib import suppress

from fsdptoys.utils.sealed_folder import FileSum

from .config import CheckpointConfig
from .manifest import (
    STATE_FILE,
    Manifest,
    UnreadableError,
    rank_file,
    reason_of,
    step_name,
)
from .ranks import Ranks
from .retention import LATEST_FILE, Series
from .storage import Storage, write_file

# Writes this rank's tensors into a folder of a storage; returns the sums of its files; collective
WriteTensors = Callable[[Storage, str], dict[str, FileSum]]

FULL = {os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}
"""The system's messages for a full disk or quota."""


Answer = tuple[dict[str, FileSum], str | None]
"""File → sum, of the files that a rank wrote; and why its write failed, or None."""


def is_full(problems: list[str]) -> bool:
    """Return whether a disk or quota is full."""
    return any(message in problem for message in FULL for problem in problems)


class Saver:
    """Saves checkpoints, one at a time; ``report`` is called on rank 0 with one sentence at a
    time."""

    def __init__(
        self,
        ranks: Ranks,
        series: Series,
        config: CheckpointConfig,
        report: Callable[[str], None],
    ) -> None:
        # Step of this run's newest checkpoint, which is not saved again
        self.committed: int | None = None
        self._ranks = ranks
        self._series = series
        self._storage = series.storage
        self._config = config
        self._report = report

    def save(
        self,
        step: int,
        write_tensors: WriteTensors,
        state: bytes,
        own: bytes,
        prunes: bool = True,
    ) -> bool:
        """Save a checkpoint; collective. Return whether it is committed, the same on all ranks.

        ``write_tensors`` writes this rank's tensors; ``state`` and ``own`` are the facts common to
        all ranks and of this one, as JSON.
        """
        ranks = self._ranks
        write = functools.partial(self._write, write_tensors, state, own)
        problems, wrote = self._attempt(step, write)
        if prunes and is_full(problems):
            has_room = ranks.broadcast(ranks.rank == 0 and self._prune(step))
            if has_room:
                problems, wrote = self._attempt(step, write)
        if problems:
            if ranks.rank == 0:
                self._report_failure(step, problems)
            return False
        if wrote and ranks.rank == 0:
            name = step_name(step)
            self._series.damaged.discard(name)
            try:
                self._series.point_to(name)
            except OSError as error:
                self._report(
                    f"{LATEST_FILE} does not name {name}: {self._place_of(error)}"
                )
            if prunes:
                self._prune(step)
        self.committed = step
        return True

    def _attempt(
        self, step: int, write: Callable[[str], Answer]
    ) -> tuple[list[str], bool]:
        """Try to save; return the reasons of a failure, and whether files were written, the same on
        all ranks."""
        ranks = self._ranks
        working, problem = ranks.broadcast(
            self._begin(step) if ranks.rank == 0 else (None, None)
        )
        if problem is not None:
            return [problem], False
        if working is None:
            return [], False
        # An error other than the system's ends the run on all ranks.
        answers = ranks.gather(ranks.on_all(lambda: write(working)))
        return ranks.broadcast(
            self._commit(step, working, answers) if ranks.rank == 0 else []
        ), True

    def _begin(self, step: int) -> tuple[str | None, str | None]:
        """Return the working folder or a problem; neither if the checkpoint exists already."""
        name = step_name(step)
        try:
            with suppress(UnreadableError):
                if self.committed == step and self._series.is_complete(name):
                    return None, None
            return self._series.begin(name), None
        except OSError as error:
            return None, self._place_of(error)

    def _write(
        self, write_tensors: WriteTensors, state: bytes, own: bytes, working: str
    ) -> Answer:
        storage = self._storage
        rank = self._ranks.rank
        facts = {rank_file(rank): own} | ({STATE_FILE: state} if rank == 0 else {})
        try:
            sums = write_tensors(storage, working)
            for file, text in facts.items():
                sums[file] = write_file(storage, f"{working}/{file}", [text])
        except OSError as error:
            return {}, self._place_of(error, rank)
        return sums, None

    def _commit(self, step: int, working: str, answers: list[Answer]) -> list[str]:
        problems = [problem for _, problem in answers if problem is not None]
        if not problems:
            files = {
                path: file_sum for sums, _ in answers for path, file_sum in sums.items()
            }
            try:
                self._series.commit(working, Manifest(step_name(step), files))
                return []
            except OSError as error:
                problems = [self._place_of(error)]
        try:
            self._series.discard(working)
        except OSError as error:
            problems.append(
                f"the incomplete checkpoint could not be removed: {self._place_of(error)}"
            )
        return problems

    def _prune(self, step: int) -> bool:
        """Delete old checkpoints; return whether any was deleted."""
        return self._series.prune(step, self._config.keep, self._config.keep_every)

    def _report_failure(self, step: int, problems: list[str]) -> None:
        newest = self._series.newest_readable()
        have = f"the newest one is {newest}" if newest else "there is none yet"
        fix = (
            "free space or set checkpoint.folder to another disk"
            if is_full(problems)
            else "make it writable"
        )
        self._report(
            f"checkpoint of step {step} was not saved: {', '.join(problems)}; {have}; {fix}"
        )

    def _place_of(self, error: OSError, rank: int = 0) -> str:
        of_rank = f" (rank {rank})" if self._ranks.size > 1 else ""
        return f"{reason_of(error)} in {self._storage.where}{of_rank}"
