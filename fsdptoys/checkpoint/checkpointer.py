"""Keeping a run's checkpoints: saving them, in the background if wanted, and going on from the newest whole one.

In the background one thread a rank saves from copies in host memory, over a gloo group that nothing else uses. The
steps wait for the copies alone, and for the save before if that is not done. With whole tensors the copies of all ranks
come together in rank 0's host memory, for a thread cannot gather over the groups that training uses.

Not covered: two runs that save into one folder at once.
"""

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from fsdptoys.errors import ConfigError

from .config import RESUME_WORDS, CheckpointConfig, Form
from .facts import ANY, Schema
from .load import Checkpoint, read_checkpoint
from .manifest import NotWholeError, UnreadableError, reason_of, to_json
from .rank_sync import Ranks
from .retention import LATEST_FILE, PARTIAL, Series, write_file
from .save import Put, Saver
from .select import Place, check_not_taken, listed, locate, none_whole, not_whole, unreadable
from .sharded_io import Whole, save_tensors, save_whole_tensors
from .storage import open_storage

T = TypeVar("T")
Tensors = dict[str, Tensor]
Copy = Callable[[Tensors, Tensors | None], Tensors]


class Checkpoints:
    """Saves a run's checkpoints, deletes old ones, and finds the one to go on from.

    Args:
        config: what is kept and from what the run goes on.
        folder: where, as a path or URL; it need not be there.
        group: a gloo group of all ranks that nothing else uses; None for one process.
        message: told one sentence at a time, on rank 0.
        copy: copies tensors to host memory, into what it returned the last time if it is given that; None to clone.
        whole: gathers the tensors of all ranks one after the other, as whole ones on the CPU of rank 0 and None
            elsewhere; None where all of them are whole already.
        schema: of the facts that are saved, which are checked when they are read.

    Attributes:
        last_step: of the newest checkpoint here that is committed or being written; changes in ``save``, ``finish`` and
            ``resume`` alone, and is the same on all ranks.

    Raises:
        ConfigError: if the folder's URL is of no known kind.
    """

    last_step: int | None

    def __init__(
        self,
        config: CheckpointConfig,
        folder: str,
        group: dist.ProcessGroup | None = None,
        message: Callable[[str], None] | None = None,
        copy: Copy | None = None,
        whole: Whole | None = None,
        schema: Schema = ANY,
    ) -> None:
        assert group is None or whole is not None or config.form is not Form.full, "who gathers whole tensors?"
        self.last_step = None
        self._config = config
        self._ranks = Ranks(group)
        self._storage = open_storage(folder)
        self._series = Series(self._storage)
        self._message = message
        self._untold: SimpleQueue[str] = SimpleQueue()
        self._saver = Saver(self._ranks, self._series, config, self._untold.put)
        self._copy = copy or _clone
        self._copies: Tensors | None = None
        self._whole = whole or _each
        self._schema = schema
        self._is_clean = False
        self._thread: threading.Thread | None = None
        self._verdict = True
        self._failure: BaseException | None = None

    def save(
        self, step: int, tensors: Tensors, facts: dict[str, Any], own_facts: dict[str, Any], prunes: bool = True
    ) -> bool:
        """Save a checkpoint, or with ``async_save`` wait for the one before, and begin; collective.

        Args:
            step: the number of steps that were taken.
            tensors: by name; DTensors, or plain ones that are the same on all ranks. May change once this returns.
            facts: what else is the same for all ranks, as JSON knows it; ``step`` and ``world_size`` are added.
            own_facts: what is this rank's own.
            prunes: whether old checkpoints may be deleted after it.

        Returns:
            Whether it is committed, on all ranks alike; True once a save in the background has begun. Why not is one
            sentence through ``message``.
        """
        self.finish()
        self._clean()
        state = to_json(facts | {"step": step, "world_size": self._ranks.size})
        own = to_json(own_facts)
        if not self._config.async_save:
            return self._settle(self._saver.save(step, self._writer(tensors), state, own, prunes))
        put = self._background_writer(tensors)

        def work() -> None:
            try:
                self._verdict = self._saver.save(step, put, state, own, prunes)
            except BaseException as error:
                self._failure = error

        self.last_step = step
        self._thread = threading.Thread(target=work, name=f"checkpoint of step {step}", daemon=True)
        self._thread.start()
        return True

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for this rank's part of a save in the background, whatever comes of it; whether there was one.

        Args:
            seconds: no longer than that; None for as long as it takes.
        """
        if self._thread is None or not self._thread.is_alive():
            return False
        self._thread.join(seconds)
        return True

    def finish(self) -> bool:
        """Wait for a save in the background; collective.

        Returns:
            Whether it, or the last save, was committed; True where there was none.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if self._failure is not None:
                failure, self._failure = self._failure, None
                self._settle(False)
                raise failure
            self._settle(self._verdict)
        return self._verdict

    def report(self) -> list[str]:
        """What went wrong in the background and was not told yet; on rank 0, at any time."""
        sentences = []
        while not self._untold.empty():
            sentences.append(self._untold.get())
        return sentences

    def gather(self, value: T) -> list[T]:
        """The values of all ranks on rank 0, and nothing elsewhere; collective, and not while a save is under way."""
        return self._ranks.gather(value)

    def resume(self, restarted: bool = False) -> Checkpoint | None:
        """Find the checkpoint to go on from, and read all its files once; collective.

        Args:
            restarted: whether this run has begun before, so that its own newest checkpoint comes before
                ``config.resume``.

        Returns:
            None for a run that starts anew.

        Raises:
            ConfigError: on all ranks, as ``peek``, or if a rank does not see the folder where checkpoints go.
        """
        self._clean()
        if (self._config.every or self._config.on_signal) and self._ranks.size > 1:
            self._check_shared()
        passed: list[str] = []
        word = self._config.resume if self._config.resume in RESUME_WORDS else None
        if restarted or word in ("auto", "must"):
            found = self._newest_whole(passed)
            if found is not None:
                return found
        if word is None:
            return self._named()
        if not restarted:
            self._ranks.ask_first(lambda: check_not_taken(self._config, self._storage))
        if word == "must":
            raise ConfigError(none_whole(self._storage, passed))
        return None

    def _writer(self, tensors: Tensors) -> Put:
        group = self._ranks.group
        if self._config.form is Form.full:
            return lambda storage, folder: save_whole_tensors(storage, folder, tensors, self._whole, group)
        return lambda storage, folder: save_tensors(storage, folder, tensors, group)

    def _background_writer(self, tensors: Tensors) -> Put:
        group = self._ranks.group
        if self._config.form is Form.full:
            whole = {name: tensor.clone() for name, tensor in self._whole(tensors) if tensor is not None}
            return lambda storage, folder: save_whole_tensors(storage, folder, whole, _each, group)
        copies = self._copies = self._copy(tensors, self._copies)
        return lambda storage, folder: save_tensors(storage, folder, copies, group)

    def _settle(self, committed: bool) -> bool:
        """Take note of a verdict, where all ranks do."""
        self._verdict = committed
        self.last_step = self._saver.committed
        if self._message is not None:
            for sentence in self.report():
                self._message(sentence)
        return committed

    def _clean(self) -> None:
        """Once, before anything is read or written: take back or remove what a process that died left here."""
        if not self._is_clean and self._ranks.rank == 0:
            self._series.clean()
            for sentence in self._series.aside:
                self._untold.put(sentence)
            self._series.aside.clear()
        self._is_clean = True

    def _newest_whole(self, passed: list[str]) -> Checkpoint | None:
        """The first that is whole, the newest before others; ``passed`` is added those before it, with the reasons."""
        found = None
        names = self._ranks.ask_first(lambda: listed(self._series.names, self._storage))
        for name in names:
            try:
                found = read_checkpoint(self._ranks, self._storage, name, self._schema)
                break
            except NotWholeError as problem:
                passed.append(f"{name} {problem}")
                self._series.damaged.add(name)
            except UnreadableError as problem:
                raise ConfigError(unreadable(self._storage, problem)) from problem
        if found is not None:
            self._series.resume_from(found.name, names)
            self._saver.committed = self.last_step = found.step
        onward = f"going on from {found.name}" if found is not None else "there is no older one"
        if self._message is not None and self._ranks.rank == 0:
            for sentence in passed:
                self._message(f"{sentence}, in {self._storage.where}; {onward}")
        return found

    def _named(self) -> Checkpoint:
        """The one that ``config.resume`` names."""

        def look() -> tuple[str, str, bool]:
            place = locate(self._config, self._storage)
            return place.storage.where, place.name, place.own

        where, name, own = self._ranks.ask_first(look)
        storage = open_storage(where)
        try:
            found = read_checkpoint(self._ranks, storage, name, self._schema)
        except NotWholeError as problem:
            sentence = not_whole(self._config, Place(storage, name, own), str(problem))
            raise ConfigError(self._ranks.broadcast(sentence)) from problem
        except UnreadableError as problem:
            raise ConfigError(unreadable(storage, problem)) from problem
        if own:
            self._series.resume_from(name, self._ranks.ask_first(lambda: listed(self._series.names, self._storage)))
            self._saver.committed = self.last_step = found.step
        return found

    def _check_shared(self) -> None:
        """Refuse a folder of one machine where there are several: they would find out at the first save."""
        probe = self._ranks.ask_first(self._write_probe)
        try:
            is_seen = self._storage.exists(probe)
        except OSError:
            is_seen = False
        blind = [rank for rank, seen in enumerate(self._ranks.gather(is_seen)) if not seen]
        blind = self._ranks.broadcast(blind)
        if self._ranks.rank == 0:
            with suppress(OSError):
                self._storage.remove(probe)
        if not blind:
            return
        sentence = (
            f"checkpoints go to {self._storage.where}, where rank {blind[0]} does not see what rank 0 writes; set "
            "checkpoint.folder to a place that all ranks share (memory:// is one process's own)"
        )
        if self._config.every:
            raise ConfigError(sentence)
        if self._message is not None and self._ranks.rank == 0:
            self._message(f"a signal could save nothing: {sentence}")

    def _write_probe(self) -> str:
        # A new name each time: network file systems remember for a while what is not there.
        probe = f".{LATEST_FILE}-{secrets.token_hex(4)}{PARTIAL}"
        try:
            self._storage.make("")
            write_file(self._storage, probe, b"x")
        except OSError as error:
            raise ConfigError(
                f"checkpoints go to {self._storage.where}, which cannot be written ({reason_of(error)}); set "
                "checkpoint.folder to a place that can be"
            ) from error
        return probe


def _clone(tensors: Tensors, into: Tensors | None) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _each(tensors: Tensors) -> Iterator[tuple[str, Tensor | None]]:
    yield from tensors.items()
