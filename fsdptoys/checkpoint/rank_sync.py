"""Collectives of saving and loading on all ranks, or their trivial forms in one process."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from fsdptoys.errors import ConfigError

T = TypeVar("T")


class Ranks:
    """All ranks of a gloo group, used by one thread per rank at a time; or a single process, for None."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def broadcast(self, value: T) -> T:
        """Return rank 0's value."""
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Return all ranks' values on rank 0, ``[]`` elsewhere."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def ask_first(self, look: Callable[[], T]) -> T:
        """Call ``look`` on rank 0 and broadcast its result, or its ConfigError."""
        found: tuple[T | None, str | None] = (None, None)
        if self.rank == 0:
            try:
                found = (look(), None)
            except ConfigError as error:
                found = (None, str(error))
        value, sentence = self.broadcast(found)
        if sentence is not None:
            raise ConfigError(sentence)
        return value  # type: ignore[return-value]
