"""Generation against a model whose continuation is known."""

import torch
from torch import Tensor, nn

from fsdptoys.sampling import generate


class Counting(nn.Module):
    """Predicts the sum of what it sees, modulo 10, with all other ids equally unlikely."""

    def __init__(self, certainty: float) -> None:
        super().__init__()
        self.certainty = certainty

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """One-hot logits, scaled."""
        return self.certainty * nn.functional.one_hot(tokens_BT.cumsum(1) % 10, 10).float()


def test_temperature_zero_takes_the_likeliest_token_within_the_context() -> None:
    """Oracle: sums by hand, over the last two tokens."""
    tokens = generate(Counting(1.0), torch.tensor([1, 2]), 4, context=2, temperature=0.0, seed=0)
    assert tokens.tolist() == [1, 2, 3, 5, 8, 3]


def test_draws_depend_on_the_seed_alone_and_follow_the_temperature() -> None:
    """Oracle: the same call again; a low temperature is as good as none, a high one is not."""
    prompt = torch.tensor([1, 2])
    first, again, other = (generate(Counting(1.0), prompt, 50, 2, 1.0, seed).tolist() for seed in (0, 0, 1))
    assert first == again != other
    for temperature in (0.01, 1e-300):
        assert generate(Counting(1.0), prompt, 4, 2, temperature, 0).tolist() == [1, 2, 3, 5, 8, 3]


def test_a_model_that_diverged_writes_no_more() -> None:
    """Oracle: the prompt."""
    assert generate(Counting(float("nan")), torch.tensor([1, 2]), 4, 2, 1.0, 0).tolist() == [1, 2]
