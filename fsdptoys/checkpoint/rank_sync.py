"""What ranks tell each other while they save and load, or what one process tells itself."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from fsdptoys.errors import ConfigError

T = TypeVar("T")


class Ranks:
    """All ranks of a group, or one process without any.

    Args:
        group: a gloo group of all ranks, over which one thread of each rank talks at a time; None for one process.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def broadcast(self, value: T) -> T:
        """The value of rank 0."""
        if self.group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks on rank 0; nothing elsewhere."""
        if self.group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []

    def ask_first(self, look: Callable[[], T]) -> T:
        """What rank 0 finds out.

        Raises:
            ConfigError: on all ranks, if rank 0 does.
        """
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
