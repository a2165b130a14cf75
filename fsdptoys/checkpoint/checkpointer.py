"""A run's checkpoints: saving, optionally in the background, and resuming from the newest complete
one.

A background save runs in one thread per rank, from copies in host memory, over a dedicated gloo
group. Training waits only for the copies, and for an unfinished previous save. ``Form.full``
gathers the copies of all ranks in rank 0's host memory first, because a thread cannot use the
process groups of training.

Not covered: two runs that save into one folder concurrently.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from fsdptoys.device import HostMemory
from fsdptoys.errors import ConfigError

from .config import CheckpointConfig, Form
from .load import Checkpoint, read_checkpoint
from .manifest import ANY, Schema, to_json
from .ranks import Ranks
from .retention import Series
from .save import Saver, WriteTensors
from .select import listing, select, write_probe
from .sharded_io import GatherFull, save_tensors
from .storage import Storage, open_storage

T = TypeVar("T")
Tensors = dict[str, Tensor]
Copy = Callable[[Tensors, Tensors | None], Tensors]


class Checkpointer:
    """Saves a run's checkpoints, deletes old ones, and finds the one to resume from.

    Args:
        folder: path or URL of the checkpoints, created on demand; ConfigError for a URL of an
            unknown scheme.
        group: dedicated gloo group of all ranks; None for one process.
        message: called on rank 0 with one sentence at a time.
        copy: copies tensors to host memory; its second argument is its previous result, to be
            reused. None to clone.
        gather_full: gathers full tensors one by one: on the CPU of rank 0, None on other ranks.
            None if all are full.
        schema: types and ranges that saved facts are checked against when they are read.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: str,
        group: dist.ProcessGroup | None = None,
        message: Callable[[str], None] | None = None,
        copy: Copy | None = None,
        gather_full: GatherFull | None = None,
        schema: Schema = ANY,
    ) -> None:
        assert (
            group is None or gather_full is not None or config.form is not Form.full
        ), "gather_full is missing"
        # Step of the newest checkpoint committed or being written, the same on all ranks; changes
        # only in ``save``, ``finish`` and ``resume``.
        self.last_step: int | None = None
        self._config = config
        self._ranks = Ranks(group)
        self._storage = open_storage(folder)
        self._message = message
        self._pending_messages: SimpleQueue[str] = SimpleQueue()
        self._series = Series(self._storage, self._pending_messages.put)
        self._saver = Saver(
            self._ranks, self._series, config, self._pending_messages.put
        )
        self._copy = copy or (
            lambda tensors, into: {
                name: tensor.detach().clone() for name, tensor in tensors.items()
            }
        )
        self._copies: Tensors | None = None
        self._gather_full = gather_full or _yield_full
        self._schema = schema
        self._is_clean = False
        self._thread: threading.Thread | None = None
        self._verdict = True
        self._failure: BaseException | None = None

    def save(
        self,
        step: int,
        tensors: Tensors,
        facts: dict[str, Any],
        own_facts: dict[str, Any],
        prunes: bool = True,
    ) -> bool:
        """Save a checkpoint; with ``async_save``, wait for the previous save and start this one.
        Collective.

        ``tensors`` are DTensors, or plain tensors equal on all ranks, and may change once this
        returns. ``facts`` are JSON values common to all ranks (``step`` and ``world_size`` are
        added), ``own_facts`` those of this rank. With ``prunes`` old checkpoints may be deleted
        afterwards. Returns whether the checkpoint is committed, the same on all ranks; True once a
        background save has started. The reason of a failure goes to ``message``.
        """
        self.finish()
        self._clean()
        state = to_json(facts | {"step": step, "world_size": self._ranks.size})
        own = to_json(own_facts)
        write_tensors = self._writer(tensors, from_copies=self._config.async_save)
        if not self._config.async_save:
            return self._settle(
                self._saver.save(step, write_tensors, state, own, prunes)
            )

        def work() -> None:
            try:
                with HostMemory():
                    self._verdict = self._saver.save(
                        step, write_tensors, state, own, prunes
                    )
            except BaseException as error:
                self._failure = error

        self.last_step = step
        self._thread = threading.Thread(
            target=work, name=f"checkpoint of step {step}", daemon=True
        )
        self._thread.start()
        return True

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for this rank's part of a background save, at most ``seconds``; return whether one
        was running."""
        if self._thread is None or not self._thread.is_alive():
            return False
        self._thread.join(seconds)
        return True

    def finish(self) -> bool:
        """Wait for a background save; return whether the last save, if any, was committed.
        Collective."""
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
        """Return background messages not yet reported; on rank 0, at any time."""
        return [
            self._pending_messages.get() for _ in range(self._pending_messages.qsize())
        ]

    def gather(self, value: T) -> list[T]:
        """Return all ranks' values on rank 0, ``[]`` elsewhere. Collective; not while a save is
        running."""
        return self._ranks.gather(value)

    def resume(self, restarted: bool = False) -> Checkpoint | None:
        """Find the checkpoint to resume from and verify all its files; None to start from scratch.
        Collective.

        At a restart of the run (``restarted``) its own newest checkpoint precedes
        ``config.resume``. ConfigError on all ranks, as ``peek``, or if a rank cannot see the
        checkpoint folder.
        """
        self._clean()
        if (self._config.every or self._config.on_signal) and self._ranks.size > 1:
            self._check_shared()
        invalid: dict[str, str] = {}

        def read(storage: Storage, name: str) -> Checkpoint:
            return read_checkpoint(self._ranks, storage, name, self._schema)

        selected = select(
            self._ranks, self._config, self._storage, restarted, read, invalid
        )
        self._series.damaged |= invalid.keys()
        if self._message is not None and self._ranks.rank == 0:
            onward = (
                f"resuming from {selected[0].name}"
                if selected
                else "there is no older one"
            )
            for name, problem in invalid.items():
                self._message(f"{name} {problem}, in {self._storage.where}; {onward}")
        if selected is None:
            return None
        location, checkpoint = selected
        if location.own:
            names = self._ranks.ask_first(
                lambda: listing(self._series.names, self._storage)
            )
            self._series.resume_from(location.name, names)
            self._saver.committed = self.last_step = checkpoint.step
        return checkpoint

    def _writer(self, tensors: Tensors, from_copies: bool) -> WriteTensors:
        gather_full = self._gather_full if self._config.form is Form.full else None
        if from_copies and gather_full is not None:
            tensors = {
                name: tensor.clone()
                for name, tensor in gather_full(tensors)
                if tensor is not None
            }
            gather_full = _yield_full
        elif from_copies:
            tensors = self._copies = self._copy(tensors, self._copies)
        return lambda storage, folder: save_tensors(
            storage, folder, tensors, self._ranks.group, gather_full
        )

    def _settle(self, committed: bool) -> bool:
        """Record a verdict; called on all ranks at the same point."""
        self._verdict = committed
        self.last_step = self._saver.committed
        if self._message is not None:
            for sentence in self.report():
                self._message(sentence)
        return committed

    def _clean(self) -> None:
        """Restore or remove leftovers of a killed process, once, before anything is read or
        written."""
        if not self._is_clean and self._ranks.rank == 0:
            self._series.clean()
        self._is_clean = True

    def _check_shared(self) -> None:
        """Reject a folder local to one of several nodes, which would otherwise fail at the first
        save."""
        probe = self._ranks.ask_first(lambda: write_probe(self._storage))
        try:
            is_visible = self._storage.exists(probe)
        except OSError:
            is_visible = False
        blind = [
            rank for rank, sees in enumerate(self._ranks.gather(is_visible)) if not sees
        ]
        blind = self._ranks.broadcast(blind)
        if self._ranks.rank == 0:
            with suppress(OSError):
                self._storage.remove(probe)
        if not blind:
            return
        sentence = (
            f"checkpoints go to {self._storage.where}, where rank {blind[0]} does not see what "
            "rank 0 writes; set checkpoint.folder to a place that all ranks share (memory:// is "
            "one process's own)"
        )
        if self._config.every:
            raise ConfigError(sentence)
        if self._message is not None and self._ranks.rank == 0:
            self._message(f"a signal could save nothing: {sentence}")


def _yield_full(tensors: Tensors) -> Iterator[tuple[str, Tensor | None]]:
    yield from tensors.items()
