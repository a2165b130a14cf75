"""Bugs of tensor parallelism for ``parity_bugs``: each function returns a context in which ranks
are forked."""

from typing import Any
from unittest import mock

from torch import Tensor

from fsdptoys.exact.slices import SlicedOps
from fsdptoys.loss.vocabulary import Vocabulary
from fsdptoys.parallel.fsdp2 import FSDP2
from fsdptoys.parallel.strategy import Strategy
from fsdptoys.parallel.tensor_parallel import TensorExchange


def shift_classes() -> Any:
    """All ranks but the first take their classes to begin one later."""
    local_labels = Vocabulary.local_labels
    return mock.patch.object(
        Vocabulary,
        "local_labels",
        lambda self, labels, classes: local_labels(
            self, labels - int(self.rank > 0), classes
        ),
    )


def count_norm_weights_on_every_rank() -> Any:
    """The gradient norm counts parameters that all ranks of tp have once for each of them."""
    return mock.patch.object(FSDP2, "local_norms", Strategy.local_norms)


def keep_gradients_of_own_tokens() -> Any:
    """Gradients of norms' weights are those of the rank's own tokens."""
    return mock.patch.object(
        TensorExchange, "sum_gradient", lambda self, param: param.view_as(param)
    )


def add_biases_on_every_rank() -> Any:
    """Each rank adds the bias of rows to its partial sum, and its gradient, of all tokens, is
    summed over ranks."""

    def linear_rows(
        self: SlicedOps,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        exchange: TensorExchange,
    ) -> Tensor:
        sums = self.sum_slices(input, weight)
        if bias is not None:
            sums = sums + self.expand(exchange.sum_gradient(bias), sums)
        return exchange.leave(sums)

    return mock.patch.object(SlicedOps, "linear_rows", linear_rows)


def divide_gradients_of_biases() -> Any:
    """The bias of rows is divided by the ranks before they sum it up, and so is its gradient."""
    sum_gradient = TensorExchange.sum_gradient

    def divided(self: TensorExchange, param: Tensor) -> Tensor:
        bias = sum_gradient(self, param)
        return bias.detach() + (bias - bias.detach()) / self.ranks

    def linear_rows(
        self: SlicedOps,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        exchange: TensorExchange,
    ) -> Tensor:
        with mock.patch.object(TensorExchange, "sum_gradient", divided):
            return right_rows(self, input, weight, bias, exchange)

    right_rows = SlicedOps.linear_rows
    return mock.patch.object(SlicedOps, "linear_rows", linear_rows)
