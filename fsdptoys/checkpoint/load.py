"""Collective verification and loading of a checkpoint."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.errors import ConfigError

from .manifest import (
    ANY,
    InvalidCheckpointError,
    Manifest,
    Schema,
    UnreadableError,
    rank_file,
    read_manifest,
    read_own,
    read_state,
    reason_of,
    verify_file,
    with_retries,
    world_size_of,
)
from .ranks import Ranks
from .shard_format import CHUNK_DTYPES, read_index
from .sharded_io import load_tensors, parameter_of
from .storage import Storage

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A complete, verified checkpoint."""

    storage: Storage
    name: str  # of its folder
    facts: dict[str, Any]  # given to ``save``, plus ``step`` and ``world_size``
    # this rank's; None if it was saved by another number of ranks
    own_facts: dict[str, Any] | None
    group: dist.ProcessGroup | None

    @property
    def step(self) -> int:
        """Number of steps completed when it was saved."""
        return int(self.facts["step"])

    def load(self, tensors: dict[str, Tensor], weights_only: bool = False) -> None:
        """Fill tensors, all or some of the checkpoint's, in place from any saved layout;
        collective.

        ConfigError on all ranks: before any tensor is filled if one is missing or differs in shape
        or dtype, if a parameter's optimizer states are left out without ``weights_only``, or if the
        checkpoint cannot be read after retries.
        """
        self._read(
            lambda: load_tensors(
                self.storage, self.name, tensors, self.group, weights_only
            )
        )

    def read_states(self) -> dict[str, dict[str, Tensor]]:
        """Return an example of each parameter's optimizer states by their names, without dims for a
        number, otherwise for the parameter's shape; others are left out. Collective."""
        ranks = Ranks(self.group)
        states: dict[str, dict[str, Tensor]] = {}

        def read() -> None:
            index = read_index(self.storage, self.name)
            for name in index:
                if name.startswith("model."):
                    states[name.removeprefix("model.")] = {}
            for name, state in index.items():
                param = parameter_of(name, index)
                if param and state.shape in ((), index[f"model.{param}"].shape):
                    kind = name.removeprefix(f"optim.{param}.")
                    shape = (2,) if state.shape else ()
                    dtype = CHUNK_DTYPES[state.dtype]
                    states[param][kind] = torch.zeros(shape, dtype=dtype)

        self._read(lambda: ranks.on_all(read if ranks.rank == 0 else lambda: None))
        return ranks.broadcast(states)

    def _read(self, read: Callable[[], T]) -> T:
        try:
            # One rank's error is raised on all ranks, so all retry together.
            return with_retries(read)
        except OSError as error:
            raise ConfigError(
                f"{self.name} in {self.storage.where} cannot be read ({reason_of(error)}); make "
                "it readable, or set checkpoint.resume to another one"
            ) from error


def read_checkpoint(
    ranks: Ranks, storage: Storage, name: str, schema: Schema = ANY
) -> Checkpoint:
    """Verify all files of a checkpoint against its manifest, each file on one rank; collective.

    Raises on all ranks InvalidCheckpointError (of the lowest rank that found damage), else
    UnreadableError.
    """
    first = _agreed(
        ranks,
        storage.where,
        name,
        "",
        lambda: read_manifest(storage, name) if ranks.rank == 0 else None,
    )
    manifest = ranks.broadcast(first)
    assert manifest is not None

    def read() -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        for path in _share(manifest, ranks):
            verify_file(storage, manifest, path)
        facts = read_state(storage, manifest, schema) if ranks.rank == 0 else None
        same_ranks = world_size_of(manifest) == ranks.size
        return facts, read_own(
            storage, manifest, rank_file(ranks.rank), schema
        ) if same_ranks else None

    facts, own_facts = _agreed(
        ranks,
        storage.where,
        name,
        f" (rank {ranks.rank})" if ranks.size > 1 else "",
        read,
    )
    facts = ranks.broadcast(facts)
    assert facts is not None
    return Checkpoint(storage, name, facts, own_facts, ranks.group)


def _agreed(
    ranks: Ranks, where: str, name: str, of_rank: str, read: Callable[[], T]
) -> T:
    """Call ``read`` on every rank and raise the first failure on all ranks; damage precedes
    unreadable files."""
    is_damaged = False
    reason = ""
    try:
        result = read()
    except InvalidCheckpointError as problem:
        is_damaged = True
        reason = f"{problem}{of_rank}"
    except UnreadableError as problem:
        reason = f"{problem.reason}{of_rank}"
    verdicts = sorted(
        (failure for failure in ranks.gather((is_damaged, reason)) if failure[1]),
        key=lambda failure: not failure[0],
    )
    is_damaged, reason = ranks.broadcast(verdicts[0] if verdicts else (False, ""))
    if is_damaged:
        raise InvalidCheckpointError(reason)
    if reason:
        raise UnreadableError(where, name, reason)
    return result


def _share(manifest: Manifest, ranks: Ranks) -> list[str]:
    """Return this rank's files: largest first, each file goes to the rank with the fewest bytes so
    far."""
    loads = [(0, rank) for rank in range(ranks.size)]
    share = []
    for path in sorted(
        manifest.files, key=lambda path: (-manifest.files[path].size, path)
    ):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + manifest.files[path].size, rank))
        if rank == ranks.rank:
            share.append(path)
    return share
