"""Replay of ranks that wait for one another, such as the stages of a pipeline.

Each rank has a trace, an allocator and a clock of its own. Ranks meet in messages and in
collectives among all of them: a rank's replay stops there until the others have come as far, and
learns when the last one arrived. As NCCL does for large messages, a send begins when its receiver
has arrived too. Messages and collectives of a pair of ranks come in the same order on both, so that
a place in this order identifies them.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

from fsdptoys.device.profile import Hardware
from fsdptoys.plan.simulator.allocator import Allocator
from fsdptoys.plan.simulator.events import Collective, Messages, Trace
from fsdptoys.plan.simulator.replay import Replay, Replaying, begin_replay

AXES = ("pp", "world")
"""Axes whose messages and collectives are among the ranks that are replayed."""


class _Rank:
    """A rank's replay, stopped where it meets others."""

    def __init__(self, number: int, replaying: Replaying) -> None:
        self.number = number
        self._replaying = replaying
        self._order: Counter[Hashable] = Counter()
        self.meetings: list[tuple[Hashable, ...]] = []
        """All of these take place in the event at which it is stopped."""
        self.arrival = 0.0
        self.result: Replay | None = None

    def resume(self, begin: float | None) -> None:
        """Continue to the next event at which it meets others, or to the end."""
        try:
            event, self.arrival = (
                next(self._replaying) if begin is None else self._replaying.send(begin)
            )
        except StopIteration as done:
            self.result = done.value
            self.meetings = []
        else:
            self.meetings = [self._numbered(key) for key in self._keys(event)]

    def _keys(self, event: Messages | Collective) -> list[tuple[Hashable, ...]]:
        if isinstance(event, Collective):
            return [(event.axis,)]
        pairs = (
            (self.number, one.peer) if one.sends else (one.peer, self.number)
            for one in event.messages
        )
        return [("message", *pair) for pair in pairs]

    def _numbered(self, key: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
        self._order[key] += 1
        return *key, self._order[key]


def replay_together(
    traces: Sequence[Trace], hardware: Hardware, allocators: Sequence[Allocator]
) -> tuple[Replay, ...]:
    """Replay the traces of ranks, numbered in this order in their group, each on a new allocator.

    Raises:
        RuntimeError: if each rank waits for one that waits itself.
    """
    ranks = [
        _Rank(number, begin_replay(trace, hardware, allocator, AXES))
        for number, (trace, allocator) in enumerate(
            zip(traces, allocators, strict=True)
        )
    ]
    arrivals: dict[Hashable, dict[int, float]] = {}

    def resume(rank: _Rank, begin: float | None) -> None:
        rank.resume(begin)
        for meeting in rank.meetings:
            arrivals.setdefault(meeting, {})[rank.number] = rank.arrival

    for rank in ranks:
        resume(rank, None)
    while waiting := [rank for rank in ranks if rank.result is None]:
        ready = [
            rank
            for rank in waiting
            if all(
                _complete(meeting, arrivals, len(ranks)) for meeting in rank.meetings
            )
        ]
        if not ready:
            stuck = {rank.number: rank.meetings for rank in waiting}
            raise RuntimeError(f"these ranks wait for one another: {stuck}")
        for rank in ready:
            resume(
                rank,
                max(
                    moment
                    for meeting in rank.meetings
                    for moment in arrivals[meeting].values()
                ),
            )
    return tuple(rank.result for rank in ranks if rank.result is not None)


def _complete(
    meeting: tuple[Hashable, ...],
    arrivals: dict[Hashable, dict[int, float]],
    ranks: int,
) -> bool:
    return len(arrivals[meeting]) == (2 if meeting[0] == "message" else ranks)
