"""A checkpoint that all ranks have read and found whole."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from .manifest import (
    STATE_FILE,
    Manifest,
    NotWholeError,
    rank_file,
    read_facts,
    read_manifest,
    step_of,
    verify_file,
)
from .ranks import Ranks
from .shards import load_tensors
from .storage import Storage


class Checkpoint:
    """A whole checkpoint.

    Attributes:
        name: of its folder.
        step: number of steps after which it was saved.
        facts: as they were given to ``save``, with ``step`` and ``world_size``.
        own_facts: of this rank; None where it was saved by another number of ranks.
    """

    def __init__(
        self,
        storage: Storage,
        name: str,
        facts: dict[str, Any],
        own_facts: dict[str, Any] | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.name = name
        self.step: int = facts["step"]
        self.facts = facts
        self.own_facts = own_facts
        self._storage = storage
        self._group = group

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Fill tensors in place, whatever layout they were saved in; collective.

        Args:
            tensors: by name; DTensors or plain ones. What else the checkpoint holds is left alone.

        Raises:
            ConfigError: if it lacks one, or holds it in another shape or dtype, before any is filled.
        """
        load_tensors(self._storage, self.name, tensors, self._group)


def read_checkpoint(ranks: Ranks, storage: Storage, name: str) -> Checkpoint:
    """Read all files of a folder, each on one rank, and hold them against its manifest; collective.

    Raises:
        NotWholeError: on all ranks, with the reason that the first of them found.
    """
    manifest: Manifest | None = None
    reason: str | None = None
    if ranks.rank == 0:
        try:
            manifest = read_manifest(storage, name)
        except NotWholeError as problem:
            reason = str(problem)
    manifest, reason = ranks.broadcast((manifest, reason))
    if manifest is None:
        raise NotWholeError(reason)
    facts: dict[str, Any] | None = None
    own_facts: dict[str, Any] | None = None
    try:
        for path in _share(manifest, ranks):
            verify_file(storage, manifest, path)
        if ranks.rank == 0:
            facts = read_facts(storage, manifest, STATE_FILE)
            if facts.get("step") != step_of(name):
                raise NotWholeError(f"is damaged: {STATE_FILE} is that of step {facts.get('step')!r:.100}")
        if _world_size(manifest) == ranks.size:
            own_facts = read_facts(storage, manifest, rank_file(ranks.rank))
    except NotWholeError as problem:
        reason = f"{problem} (rank {ranks.rank})" if ranks.size > 1 else str(problem)
    reasons = [reason for reason in ranks.gather(reason) if reason is not None]
    facts, reason = ranks.broadcast((facts, reasons[0] if reasons else None))
    if reason is not None:
        raise NotWholeError(reason)
    assert facts is not None
    return Checkpoint(storage, name, facts, own_facts, ranks.group)


def _share(manifest: Manifest, ranks: Ranks) -> list[str]:
    """The files that this rank reads: the largest first, each for the rank that has the fewest bytes so far."""
    loads = [0] * ranks.size
    share = []
    for path in sorted(manifest.files, key=lambda path: (-manifest.files[path].size, path)):
        rank = loads.index(min(loads))
        loads[rank] += manifest.files[path].size
        if rank == ranks.rank:
            share.append(path)
    return share


def _world_size(manifest: Manifest) -> int:
    """Number of ranks that saved it."""
    rank = 0
    while rank_file(rank) in manifest.files:
        rank += 1
    return rank
