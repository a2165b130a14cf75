"""Collectives of saving and loading, over a gloo group of their own."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdptoys.errors import ConfigError

T = TypeVar("T")


class Ranks:
    """All ranks of a gloo group, used by one thread per rank at a time; or a single process, for
    None."""

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

    def scatter(self, values: list[T]) -> T:
        """Return this rank's of rank 0's values."""
        if self.group is None:
            return values[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, values or None, src=0, group=self.group)
        mine: T = received[0]
        return mine

    def ask_first(self, look: Callable[[], T]) -> T:
        """Call ``look`` on rank 0 and broadcast its result, or its ConfigError."""
        answer: tuple[T | None, str | None] = (None, None)
        if self.rank == 0:
            try:
                answer = (look(), None)
            except ConfigError as error:
                answer = (None, str(error))
        value, sentence = self.broadcast(answer)
        if sentence is not None:
            raise ConfigError(sentence)
        return value  # type: ignore[return-value]

    def on_all(self, call: Callable[[], T]) -> T:
        """Call ``call`` on every rank; if it fails on any, raise the first failed rank's error on
        all."""
        failure: Exception | None = None
        try:
            result = call()
        except Exception as error:
            failure = error
        failures = [failure]
        if self.group is not None:
            anywhere = torch.tensor(failure is not None, dtype=torch.int32)
            dist.all_reduce(anywhere, group=self.group)
            if anywhere.item():  # saves the all-gather of objects otherwise
                failures *= self.size
                dist.all_gather_object(failures, failure, group=self.group)
        for first in failures:
            if first is not None:
                raise first
        return result
