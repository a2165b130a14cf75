"""A model on copies of its parameters in another dtype."""

import torch

from fsdptoys.models.generate import Draw, generate
from fsdptoys.parallel.precision import CastParameters
from tests.parallel.runs import TINY


def test_model_on_cast_parameters_generates_text() -> None:
    """Oracle: the model itself, with copies in its own dtype; generation passes a cache by keyword."""
    torch.manual_seed(0)
    model = TINY["qwen3"].build().eval()
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.2)
    prompt_T = torch.tensor([3, 1, 4])
    found = generate(CastParameters(model, torch.float32), prompt_T, 6, 16, Draw(0.0))
    assert torch.equal(found, generate(model, prompt_T, 6, 16, Draw(0.0)))
