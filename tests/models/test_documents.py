"""Documents packed into one sequence, compared with the same documents alone."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fsdptoys.models import Ops, attended_keys, choose_ops, use_ops
from fsdptoys.models.documents import document_positions
from fsdptoys.models.kernels import causal_flex_attention
from tests.harness.families import SMALL
from tests.harness.folders import build

END = 7
LENGTHS = [1, 30, 11, 1, 1, 49, 7]
"""Lengths of a sequence's documents, the last without its end; models with chunked attention have
chunks of 24."""


def packed(vocab_size: int) -> Tensor:
    """Two sequences; the second has the documents in reverse order."""
    rows = []
    for lengths in (LENGTHS, LENGTHS[::-1]):
        documents = [
            torch.randint(END + 1, vocab_size, (length,)) for length in lengths
        ]
        for document in documents[:-1]:
            document[-1] = END
        rows.append(torch.cat(documents))
    return torch.stack(rows)


def pieces(tokens_BT: Tensor) -> Iterator[tuple[int, int, int]]:
    """Row, start and stop of each document, by a loop over the tokens."""
    for row, tokens in enumerate(tokens_BT.tolist()):
        start = 0
        for position, token in enumerate(tokens):
            if token == END or position == len(tokens) - 1:
                yield row, start, position + 1
                start = position + 1


@pytest.mark.parametrize("case", SMALL)
def test_packed_documents_have_the_logits_and_gradients_of_separate_ones(
    case: str,
) -> None:
    """Oracle: the same model without masks on one document at a time; without masks the pack
    differs."""
    model = build(SMALL[case])
    tokens_BT = packed(model.config.vocab_size)
    weights_BTV = torch.randn(*tokens_BT.shape, model.config.vocab_size)

    def gradients() -> list[Tensor]:
        grads = [
            param.grad.clone() for param in model.parameters() if param.grad is not None
        ]
        model.zero_grad(set_to_none=True)
        return grads

    unmasked_BTV = model(tokens_BT).detach()
    alone_BTV = torch.zeros_like(unmasked_BTV)
    for row, start, stop in pieces(tokens_BT):
        logits = model(tokens_BT[row : row + 1, start:stop])
        (logits * weights_BTV[row, start:stop]).sum().backward()
        alone_BTV[row, start:stop] = logits[0].detach()
    expected = gradients()

    model.document_end = END
    together_BTV = model(tokens_BT)
    (together_BTV * weights_BTV).sum().backward()
    scale = alone_BTV.abs().amax()
    assert (together_BTV.detach() - alone_BTV).abs().amax() < 1e-5 * scale
    assert (unmasked_BTV - alone_BTV).abs().amax() > 1e-2 * scale
    # A bias of keys has none but roundings
    largest = max(float(expected_grad.abs().amax()) for expected_grad in expected)
    for grad, expected_grad in zip(gradients(), expected, strict=True):
        assert (grad - expected_grad).abs().amax() < 1e-5 * largest


def test_positions_and_attended_keys_restart_at_documents() -> None:
    """Oracle: counting by hand, with chunks and without."""
    tokens_BT = packed(20)
    positions_BT = torch.empty_like(tokens_BT)
    for row, start, stop in pieces(tokens_BT):
        positions_BT[row, start:stop] = torch.arange(stop - start)
    assert torch.equal(document_positions(tokens_BT, END), positions_BT)
    lengths = [stop - start for _, start, stop in pieces(tokens_BT)]
    assert attended_keys(tokens_BT, END, None) == sum(length**2 for length in lengths)
    in_chunks = [(length // 24) * 24**2 + (length % 24) ** 2 for length in lengths]
    assert attended_keys(tokens_BT, END, 24) == sum(in_chunks)


@pytest.mark.parametrize("documents", [True, False])
@pytest.mark.parametrize("operation", ["document_attention", "attention"])
@torch.no_grad()
def test_model_uses_flex_attention_if_configured(
    operation: str, documents: bool
) -> None:
    """Oracle: the model with PyTorch's attention and dense masks; Llama 4 has masks of two
    kinds."""
    model = build(SMALL["llama4"])
    model.document_end = END if documents else None
    tokens_BT = packed(model.config.vocab_size)
    expected = model(tokens_BT)
    use_ops(model, choose_ops({operation: "flex"}))
    assert (model.ops.attention is causal_flex_attention) is (operation == "attention")
    assert model.ops.document_attention is not Ops().document_attention
    torch.testing.assert_close(model(tokens_BT), expected, rtol=1e-5, atol=1e-5)
