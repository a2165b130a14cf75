"""Models that read a few tokens at a time, compared with the same models on all tokens."""

import pytest
import torch

from fsdptoys.models import KeyValueCache
from tests.harness.families import SMALL
from tests.harness.folders import build
from tests.harness.run_tables import levels

PIECES = {
    "one by one": [1] * 53,
    "a prompt that ends within a chunk, then one by one": [29] + [1] * 24,
    "a prompt that ends with a chunk": [24] + [1] * 29,
    "pieces that cross chunks": [5, 31, 2, 15],
}
"""Splits of 53 tokens; models with chunked attention have chunks of 24."""


@pytest.mark.parametrize(
    "pieces",
    levels(PIECES, {"a prompt that ends with a chunk", "pieces that cross chunks"}),
)
@pytest.mark.parametrize("case", SMALL)
@torch.no_grad()
def test_cached_logits_equal_those_of_the_full_sequence(case: str, pieces: str) -> None:
    """Oracle: the model without a cache, at every position, two rows at a time."""
    model = build(SMALL[case])
    tokens_BT = torch.randint(0, model.config.vocab_size, (2, 53))
    expected_BTV = model(tokens_BT)
    cache = KeyValueCache()
    found_BTV = torch.cat(
        [model(piece, cache=cache) for piece in tokens_BT.split(PIECES[pieces], dim=1)],
        dim=1,
    )
    error = (found_BTV - expected_BTV).abs().amax() / expected_BTV.abs().amax()
    assert error < 1e-5 and cache.length == 53


@torch.no_grad()
def test_chunked_attention_caches_only_its_chunk() -> None:
    """Oracle: the shapes; the last block of four has full attention."""
    model = build(SMALL["llama4"])
    cache = KeyValueCache()
    for piece in torch.randint(0, 96, (1, 60)).split([50, 5, 5], dim=1):
        model(piece, cache=cache)
    blank = torch.zeros(1, 2, 0, 32)
    lengths = [
        cache.extend(layer.attn, blank, blank)[0].shape[2] for layer in model.layers
    ]
    assert lengths == [60 % 24] * 3 + [60]
