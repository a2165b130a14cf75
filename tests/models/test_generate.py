"""Generation, compared with a model of known continuation and with the models' own forward of the
full text."""

import pytest
import torch
from torch import Tensor, nn

from fsdptoys.models import KeyValueCache
from fsdptoys.models import generate as sampling
from fsdptoys.models.generate import Draw, generate
from tests.harness.families import SMALL
from tests.harness.folders import build

GREEDY = Draw(temperature=0.0)


class Counting(nn.Module):
    """Predicts the sum of its inputs modulo 10, with all other ids equally unlikely."""

    def __init__(self, certainty: float) -> None:
        super().__init__()
        self.certainty = certainty
        self.sums: dict[KeyValueCache, int] = {}
        self.read = 0

    def forward(self, tokens_BT: Tensor, cache: KeyValueCache) -> Tensor:
        """One-hot logits, scaled."""
        sums_BT = tokens_BT.cumsum(1) + self.sums.get(cache, 0)
        self.sums[cache] = int(sums_BT[0, -1])
        self.read += tokens_BT.shape[1]
        return self.certainty * nn.functional.one_hot(sums_BT % 10, 10).float()


def test_tokens_within_the_context_are_read_once() -> None:
    """Oracle: sums by hand, and the number of the model's input tokens; beyond the context, two per
    token."""
    model = Counting(1.0)
    assert generate(model, torch.tensor([1, 2]), 4, 5, GREEDY).tolist() == [
        1,
        2,
        3,
        6,
        2,
        4,
    ]
    assert model.read == 5
    model = Counting(1.0)
    generate(model, torch.tensor([1, 2, 3]), 4, 2, GREEDY)
    assert model.read == 8


def test_samples_depend_on_the_seed_and_the_temperature() -> None:
    """Oracle: the repeated call; a low temperature equals greedy sampling, a high one does not."""
    prompt = torch.tensor([1, 2])
    first, again, other = (
        generate(Counting(1.0), prompt, 50, 2, Draw(1.0, seed=seed)).tolist()
        for seed in (0, 0, 1)
    )
    assert first == again != other
    for temperature in (0.01, 1e-300):
        assert generate(Counting(1.0), prompt, 4, 2, Draw(temperature)).tolist() == [
            1,
            2,
            3,
            5,
            8,
            3,
        ]


@pytest.mark.parametrize(
    ("draw", "drawn"),
    [
        (Draw(), {0, 1, 2, 3}),
        (Draw(top_k=2), {2, 3}),
        (Draw(top_k=9), {0, 1, 2, 3}),
        (Draw(top_p=0.49), {3}),
        (Draw(top_p=0.51), {2, 3}),
        (Draw(top_p=0.8), {1, 2, 3}),
        (Draw(top_k=2, top_p=0.6), {3}),
        (Draw(top_k=2, top_p=0.7), {2, 3}),
    ],
    ids=str,
)
def test_top_k_and_top_p_keep_the_most_likely_tokens(
    draw: Draw, drawn: set[int]
) -> None:
    """Oracle: sums by hand of the probabilities 0.12, 0.13, 0.25 and 0.5; of the last two alone,
    1/3 and 2/3."""
    logits_V = torch.tensor([0.12, 0.13, 0.25, 0.5]).double().log()
    generator = torch.Generator().manual_seed(0)
    assert {int(draw.choose(logits_V, generator)) for _ in range(300)} == drawn


@pytest.mark.parametrize(
    ("certainty", "options", "expected"),
    [(1.0, {"end": {8, 9}}, [1, 2, 3, 5, 8]), (float("nan"), {}, [1, 2])],
    ids=["end token", "logits that are not finite"],
)
def test_generation_stops(
    certainty: float, options: dict[str, set[int]], expected: list[int]
) -> None:
    """Oracle: sums by hand, and the prompt."""
    assert (
        generate(
            Counting(certainty), torch.tensor([1, 2]), 4, 2, GREEDY, **options
        ).tolist()
        == expected
    )


@pytest.mark.parametrize("context", [pytest.param(128, marks=pytest.mark.extended), 30])
@pytest.mark.parametrize("case", SMALL)
def test_greedy_text_equals_generation_without_a_cache(
    case: str, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a loop that reads the full context for every token; prompts are read in several
    pieces."""
    monkeypatch.setattr(sampling, "PROMPT_TOKENS", 7)
    model = build(SMALL[case])
    prompt_T = torch.randint(0, 96, (20,))
    expected_T = prompt_T
    with torch.no_grad():
        for _ in range(30):
            expected_T = torch.cat(
                [
                    expected_T,
                    model(expected_T[-context:].unsqueeze(0))[0, -1:].argmax(-1),
                ]
            )
    assert torch.equal(generate(model, prompt_T, 30, context, GREEDY), expected_T)
