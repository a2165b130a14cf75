"""Score and generate continuations of token ids with a trained model, as tasks ask for.

Shapes: B sequences, T tokens of the longest, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdptoys.models import DecoderModel
from fsdptoys.models.generate import Draw, generate

PADDING = 0
"""Id behind shorter sequences of a batch, which no causal model sees."""


@dataclass(frozen=True)
class Score:
    """How likely a continuation is."""

    log_probability: float
    """Sum over its tokens, in nats."""
    is_greedy: bool
    """Whether each of its tokens is the likeliest one."""


class Continuations:
    """Continuations of a model.

    Args:
        model: in evaluation mode, on ``device``.
        context: most tokens that it sees; longer sequences lose their beginning.
        device: of the model.
    """

    def __init__(self, model: DecoderModel, context: int, device: torch.device) -> None:
        self._model = model
        self.context = context
        self._device = device

    @torch.no_grad()
    def scores(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], batch: int
    ) -> list[Score]:
        """Score continuations, ``batch`` at a time, in the order of the pairs.

        Args:
            pairs: ids before a continuation, at least one, and those of the continuation, at most
                as many as the context has.
            batch: sequences of a forward.
        """
        scores: list[Score | None] = [None] * len(pairs)
        # Those of similar length share a forward
        order = sorted(
            range(len(pairs)), key=lambda index: -sum(map(len, pairs[index]))
        )
        for first in range(0, len(order), batch):
            indices = order[first : first + batch]
            rows = [self._row(*pairs[index]) for index in indices]
            logits_BTV = self._logits([row[:-1] for row in rows])
            for index, row, logits_TV in zip(indices, rows, logits_BTV, strict=True):
                count = len(pairs[index][1])
                targets = torch.tensor(
                    row[-count:] if count else [], device=self._device
                )
                own_TV = logits_TV[len(row) - 1 - count : len(row) - 1].float()
                losses_T = own_TV.log_softmax(-1).gather(1, targets.long()[:, None])
                scores[index] = Score(
                    float(losses_T.double().sum()),
                    bool((own_TV.argmax(-1) == targets).all()),
                )
        return [score for score in scores if score is not None]

    def generate(
        self,
        ids: Sequence[int],
        count: int,
        draw: Draw,
        ends: Collection[int],
        is_done: Callable[[list[int]], bool],
    ) -> list[int]:
        """Return the ids that follow, without an end.

        Args:
            ids: of the prompt, at least one.
            count: most tokens to add.
            draw: sampling.
            ends: ids that end a text.
            is_done: called with the added ids after each; True ends the text.
        """
        prompt_T = torch.tensor(ids, device=self._device)
        end = _End(frozenset(ends), is_done)
        tokens_T = generate(self._model, prompt_T, count, self.context, draw, end)
        added: list[int] = tokens_T[len(ids) :].tolist()
        return added[:-1] if added and added[-1] in end.ids else added

    def _row(self, before: Sequence[int], continuation: Sequence[int]) -> list[int]:
        assert before and len(continuation) <= self.context
        return [*before, *continuation][-(self.context + 1) :]

    def _logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, rows))
        tokens_BT = torch.full((len(rows), longest), PADDING)
        for tokens_T, row in zip(tokens_BT, rows, strict=True):
            tokens_T[: len(row)] = torch.tensor(row)
        logits_BTV: Tensor = self._model(tokens_BT.to(self._device))
        return logits_BTV


class _End(Collection[int]):
    """Ends a text after an end, or when a function of its ids says so; asked once for each id."""

    def __init__(
        self, ids: frozenset[int], is_done: Callable[[list[int]], bool]
    ) -> None:
        self.ids = ids
        self._is_done = is_done
        self._added: list[int] = []

    def __contains__(self, token: object) -> bool:
        if token in self.ids:
            return True
        assert isinstance(token, int)
        self._added.append(token)
        return self._is_done(self._added)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)
