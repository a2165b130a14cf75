"""Schedules of pipelines without their contents: the order of forwards and backwards, and how long
they take together.

Covers what ``torch.distributed.pipelining`` runs for gpipe, 1f1b and interleaved. A message starts
once both ranks have issued it, and takes no time.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fsdptoys.models.stages import Stage
from fsdptoys.parallel.pipeline import PipelineSchedule


class Action(NamedTuple):
    """The forward or backward of a micro-batch through a stage."""

    is_forward: bool
    stage: int
    micro_batch: int

    @property
    def before(self) -> "Action":
        """The action that sends the message it needs."""
        return self._replace(stage=self.stage - (1 if self.is_forward else -1))

    @property
    def after(self) -> "Action":
        """The action that needs its message."""
        return self._replace(stage=self.stage + (1 if self.is_forward else -1))

    def needs(self, last: int) -> bool:
        """Whether it depends on a message; ``last`` is the last stage."""
        return 0 <= self.before.stage <= last


def order_of(
    schedule: PipelineSchedule, ranks: int, rank: int, count: int
) -> Iterator[Action]:
    """Forwards and backwards of ``count`` micro-batches on a rank, in their order.

    Source: the papers of ``parallel.pipeline``; a test compares it with
    ``torch.distributed.pipelining``.
    """
    per_rank = schedule.stages_per_rank
    after = ranks - 1 - rank
    total = count * per_rank
    # Forwards before the first backward; afterwards both alternate.
    ahead = {
        PipelineSchedule.gpipe: total,
        PipelineSchedule("1f1b"): after,
        PipelineSchedule.interleaved: ranks + 2 * after,
    }
    warm_up = min(ahead[schedule], total)

    def action(is_forward: bool, number: int) -> Action:
        # Micro-batches pass in groups of as many as ranks.
        rounds, offset = divmod(number, ranks)
        turn, own = divmod(rounds, per_rank)
        own = own if is_forward else per_rank - 1 - own
        return Action(is_forward, own * ranks + rank, turn * ranks + offset)

    for number in range(total + warm_up):
        if number < total:
            yield action(True, number)
        if number >= warm_up:
            yield action(False, number - warm_up)


def most_in_flight(order: Sequence[Action], stages: Sequence[Stage]) -> int:
    """Maximum over a step of the blocks in flight on a rank: each counts once per micro-batch."""
    now = most = 0
    for action in order:
        now += stages[action.stage].size * (1 if action.is_forward else -1)
        most = max(most, now)
    return most


def duration(
    orders: Sequence[Sequence[Action]], seconds: Sequence[Sequence[float]]
) -> float:
    """Seconds of a step's forwards and backwards, bubbles included; an action waits for the message
    that it needs.

    Messages of a rank are serialized. Each starts once both ranks have issued it, and takes no
    time.

    Args:
        orders: actions of each rank.
        seconds: of a micro-batch's forward and of its backward through each stage.
    """
    ranks = len(orders)
    last = len(seconds) - 1
    programs = [deque(program) for program in _with_messages(orders, last)]
    issued: list[deque[tuple[Action, float]]] = [deque() for _ in orders]
    clocks = [0.0] * ranks
    free = [0.0] * ranks
    sent = dict[Action, float]()
    while any(programs):
        for rank, program in enumerate(programs):
            while program:
                action, is_message = program[0]
                if is_message:
                    issued[rank].append((action, clocks[rank]))
                else:
                    if action.needs(last) and action.before not in sent:
                        break
                    of_forward, of_backward = seconds[action.stage]
                    clocks[rank] = max(clocks[rank], sent.get(action.before, 0.0))
                    clocks[rank] += of_forward if action.is_forward else of_backward
                program.popleft()
        for rank, messages in enumerate(issued):
            while messages:
                action, moment = messages[0]
                sender = action.stage % ranks
                receiver = action.after.stage % ranks
                other = receiver if rank == sender else sender
                if not issued[other] or issued[other][0][0] != action:
                    break
                sent[action] = free[rank] = free[other] = max(
                    moment, issued[other][0][1], free[rank], free[other]
                )
                messages.popleft()
                issued[other].popleft()
    return max(clocks)


def _with_messages(
    orders: Sequence[Sequence[Action]], last: int
) -> list[list[tuple[Action, bool]]]:
    """Program of each rank: (action, False), and (sending action, True) for a message, on sender
    and receiver alike."""
    programs: list[list[tuple[Action, bool]]] = [[] for _ in orders]
    left = [deque(order) for order in orders]
    received = set[Action]()
    while any(left):
        for rank, actions in enumerate(left):
            if not actions or (
                actions[0].needs(last) and actions[0].before not in received
            ):
                continue
            action = actions.popleft()
            programs[rank].append((action, False))
            if 0 <= action.after.stage <= last:
                programs[rank].append((action, True))
                programs[action.after.stage % len(orders)].append((action, True))
                received.add(action)
    return programs
