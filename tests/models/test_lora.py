"""Low-rank adapters: their initial values, what trains, and which inputs are dropped."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdptoys.models.lora import (
    LoRALinear,
    Samples,
    add_adapters,
    drop,
    init_adapter_rows,
    is_adapter,
)
from fsdptoys.parallel.init_weights import init_buffers, materialize, seeded
from tests.harness.tiny import FAMILIES

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(family: str, dropout: float = 0.0) -> Any:
    with torch.device("meta"):
        model = FAMILIES[family].build()
    add_adapters(model, TARGETS, rank=4, alpha=8.0, dropout=dropout, samples=Samples(1))
    own = seeded(model.row_initializer(), 0)
    adapters = seeded(init_adapter_rows, 0)
    materialize(
        model,
        torch.device("cpu"),
        lambda param, name: (adapters if is_adapter(name) else own)(param, name),
    )
    init_buffers(model, torch.device("cpu"), torch.float32)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_start_without_effect_and_alone_get_gradients(family: str) -> None:
    """Oracle: the same model with adapters multiplied by zero; the names of parameters."""
    model = adapted(family)
    tokens = torch.randint(0, 30, (2, 24), generator=torch.Generator().manual_seed(0))
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, LoRALinear):
            module.scale = 0.0
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=0, atol=0)
    model(tokens).square().sum().backward()
    trained = {
        name for name, param in model.named_parameters() if param.grad is not None
    }
    assert (
        trained == {name for name, _ in model.named_parameters() if is_adapter(name)}
        and trained
    )


def test_an_adapter_adds_its_product() -> None:
    """Oracle: one matrix W + alpha/rank · B A."""
    model = adapted("llama")
    layer = next(module for module in model.modules() if isinstance(module, LoRALinear))
    nn.init.normal_(layer.lora_b.weight)
    input_NI = torch.randn(5, layer.in_features)
    whole = layer.weight + 2.0 * layer.lora_b.weight @ layer.lora_a.weight
    torch.testing.assert_close(layer(input_NI), input_NI @ whole.t())


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_has_a_sample_of_every_token(family: str) -> None:
    """Oracle: each sample in a batch of its own, also in experts that all tokens share."""
    model = adapted(family, dropout=0.25)
    samples = next(
        module.samples for module in model.modules() if isinstance(module, LoRALinear)
    )
    for module in model.modules():
        if isinstance(module, LoRALinear):
            nn.init.normal_(module.lora_b.weight, std=0.1)
    tokens = torch.randint(0, 30, (2, 24), generator=torch.Generator().manual_seed(0))
    samples.numbers_B = torch.tensor([3, 8])
    both = model(tokens)
    for row, number in enumerate((3, 8)):
        samples.numbers_B = torch.tensor([number])
        torch.testing.assert_close(model(tokens[row : row + 1]), both[row : row + 1])


def dropped(
    numbers: list[int], tokens: int, layer: int = 0, seed: int = 1, share: float = 0.25
) -> Tensor:
    samples = Samples(seed)
    samples.numbers_B = torch.tensor(numbers)
    return drop(torch.ones(len(numbers), tokens, 64), share, samples, layer)


def test_dropout_depends_on_the_sample_not_on_the_batch() -> None:
    """Oracle: rows of a larger batch; other samples, layers and seeds drop other elements."""
    rows = dropped([7, 8, 9], 40)
    assert torch.equal(rows[1:2], dropped([8], 40))
    for other in (
        dropped([9], 40),
        dropped([8], 40, layer=1),
        dropped([8], 40, seed=2),
    ):
        agreeing = (rows[1:2] == other).float().mean().item()
        assert agreeing == pytest.approx(0.25**2 + 0.75**2, abs=0.03)


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    """Oracle: the binomial distribution, five standard deviations; scaled by 1 / (1 - share)."""
    for share in (0.05, 0.5):
        values = dropped(list(range(20)), 100, share=share)
        zeros = (values == 0).float()
        bound = 5 * (share * (1 - share) / values.numel()) ** 0.5
        assert zeros.mean().item() == pytest.approx(share, abs=bound)
        assert (
            zeros.mean(dim=(0, 1)).std().item()
            < 3 * (share * (1 - share) / 2000) ** 0.5
        )
        assert values.max().item() == pytest.approx(1 / (1 - share))


def test_targets_that_no_block_has_are_refused() -> None:
    """Oracle: the message."""
    with torch.device("meta"):
        model = FAMILIES["llama"].build()
    with pytest.raises(ValueError, match="none of c_attn is a linear layer"):
        add_adapters(model, ["c_attn"], 4, 8.0, 0.0, Samples(0))
