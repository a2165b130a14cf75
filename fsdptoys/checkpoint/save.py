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
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from fsdptoys.utils.sealed_folder import FileSum

from .checksums import SummingStorage
from .config import CheckpointConfig
from .load import Ranks
from .manifest import STATE_FILE, Manifest, UnreadableError, rank_file, reason_of, step_name
from .retention import LATEST_FILE, Series, write_file
from .storage import Storage

# Writes this rank's tensors into a folder of a storage; collective
Put = Callable[[Storage, str], object]

FULL = {os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)}
"""The system's messages for a full disk or quota."""


@dataclass(frozen=True)
class Answer:
    """A rank's report on its writes."""

    rank: int
    sums: dict[str, FileSum]  # file name → size and SHA-256
    problem: str | None  # reason of a failure
    is_own: bool  # whether the failure is this rank's own, not received from another rank


class Saver:
    """Saves checkpoints, one at a time; ``report`` is called on rank 0 with one sentence at a
    time."""

    def __init__(
        self, ranks: Ranks, series: Series, config: CheckpointConfig, report: Callable[[str], None]
    ) -> None:
        # Step of this run's newest checkpoint, which is not saved again
        self.committed: int | None = None
        self._ranks = ranks
        self._series = series
        self._storage = series.storage
        self._config = config
        self._report = report

    def save(self, step: int, put: Put, state: bytes, own: bytes, prunes: bool = True) -> bool:
        """Save a checkpoint; collective. Return whether it is committed, the same on all ranks.

        ``put`` writes the tensors; ``state`` and ``own`` are the facts common to all ranks and of
        this one, as JSON.
        """
        ranks = self._ranks
        problems, wrote = self._attempt(step, put, state, own)
        if prunes and any(words in problem for words in FULL for problem in problems):
            has_room = ranks.broadcast(ranks.rank == 0 and self._prune(step))
            if has_room:
                problems, wrote = self._attempt(step, put, state, own)
        if ranks.rank == 0:
            for sentence in self._series.aside:
                self._report(sentence)
            self._series.aside.clear()
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
                self._report(f"{LATEST_FILE} does not name {name}: {self._place_of(error)}")
            if prunes:
                self._prune(step)
        self.committed = step
        return True

    def _attempt(self, step: int, put: Put, state: bytes, own: bytes) -> tuple[list[str], bool]:
        """Try to save; return the reasons of a failure, and whether files were written, the same on
        all ranks."""
        ranks = self._ranks
        working, problem = ranks.broadcast(self._begin(step) if ranks.rank == 0 else (None, None))
        if problem is not None:
            return [problem], False
        if working is None:
            return [], False
        answers = ranks.gather(self._write(working, put, state, own))
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

    def _write(self, working: str, put: Put, state: bytes, own: bytes) -> Answer:
        summing, rank = SummingStorage(self._storage), self._ranks.rank
        storage = cast(Storage, summing)
        problem = None
        try:
            put(storage, working)
            write_file(storage, f"{working}/{rank_file(rank)}", own)
            if rank == 0:
                write_file(storage, f"{working}/{STATE_FILE}", state)
        except OSError as error:
            problem = self._place_of(summing.refused or error, rank)
        sums = {path.removeprefix(f"{working}/"): said for path, said in summing.sums.items()}
        return Answer(rank, sums, problem, summing.refused is not None)

    def _commit(self, step: int, working: str, answers: list[Answer]) -> list[str]:
        failed = [answer for answer in answers if answer.problem is not None]
        problems = [
            str(answer.problem) for answer in [each for each in failed if each.is_own] or failed[:1]
        ]
        if not problems:
            files = {path: said for answer in answers for path, said in answer.sums.items()}
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
        deleted, problems = self._series.prune(step, self._config.keep, self._config.keep_every)
        for problem in problems:
            self._report(problem)
        return bool(deleted)

    def _report_failure(self, step: int, problems: list[str]) -> None:
        newest = self._series.newest_readable()
        have = f"the newest one is {newest}" if newest else "there is none yet"
        is_full = any(words in problem for words in FULL for problem in problems)
        fix = (
            "free space or set checkpoint.folder to another disk" if is_full else "make it writable"
        )
        self._report(
            f"checkpoint of step {step} was not saved: {', '.join(problems)}; {have}; {fix}"
        )

    def _place_of(self, error: OSError, rank: int = 0) -> str:
        of_rank = f" (rank {rank})" if self._ranks.size > 1 else ""
        return f"{reason_of(error)} in {self._storage.where}{of_rank}"
