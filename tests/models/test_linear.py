"""Linear layers computed in float32: the values of torch's own bf16 matmuls, forward and
backward; and the memory of feed-forwards."""

import weakref

import pytest
import torch
from torch import Tensor, nn

from fsdptoys.loss import build_loss
from fsdptoys.models import linear as linear_module
from fsdptoys.models.layers import GELUFeedForward, Linear, SwiGLU
from fsdptoys.models.self_attention import Attention


@pytest.fixture
def no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that cannot multiply bf16."""
    monkeypatch.setattr(linear_module, "lacks_matmul", lambda dtype: True)


def gradients(
    module: torch.nn.Module, input_BTD: torch.Tensor, *args: object
) -> list[torch.Tensor]:
    """Output, gradient of the input and of all parameters, in bf16."""
    input_BTD = input_BTD.clone().requires_grad_()
    module.zero_grad()
    output = module(input_BTD, *args)
    output.float().square().sum().backward()
    results = [output, input_BTD.grad, *(param.grad for param in module.parameters())]
    assert all(
        tensor is not None and tensor.dtype == torch.bfloat16 for tensor in results
    )
    return results  # type: ignore[return-value]


@pytest.mark.usefixtures("no_bfloat16")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(3, 24), (2, 5, 24)])
def test_linear_computed_in_float32_equals_float64(
    bias: bool, shape: tuple[int, ...]
) -> None:
    """Oracle: the same bf16 weights and inputs in float64, to the rounding of bf16."""
    torch.manual_seed(0)
    layer = Linear(24, 16, bias=bias).bfloat16()
    exact = torch.nn.Linear(24, 16, bias=bias).double()
    exact.load_state_dict(layer.state_dict())
    input_BTD = torch.randn(shape).bfloat16()
    results = gradients(layer, input_BTD)
    exact_input = input_BTD.double().requires_grad_()
    output = exact(exact_input)
    output.backward(2 * results[0].double())
    expected = [output, exact_input.grad, *(param.grad for param in exact.parameters())]
    for a, b in zip(results, expected, strict=True):
        assert b is not None
        assert (a.double() - b).norm() <= 0.005 * b.norm()


def test_attention_computed_in_float32_equals_torch_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: torch's bf16 kernels, to the rounding of bf16."""
    torch.manual_seed(0)
    attention = Attention(32, 4, 2, 8, rotation=None).bfloat16()
    hidden_BTD = torch.randn(2, 6, 32).bfloat16()
    results = []
    for lacks in (False, True):
        monkeypatch.setattr(
            linear_module, "lacks_matmul", lambda dtype, lacks=lacks: lacks
        )
        results.append(gradients(attention, hidden_BTD, None))
    for a, b in zip(*results, strict=True):
        assert (a - b).float().norm() <= 0.02 * b.float().norm()


@pytest.mark.usefixtures("no_bfloat16")
def test_plain_loss_multiplies_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the dtypes passed to torch's own matmul, none of them bf16."""
    dtypes = []
    own = torch.nn.functional.linear

    def spy(input: torch.Tensor, *args: torch.Tensor | None) -> torch.Tensor:
        dtypes.append(input.dtype)
        return own(input, *args)

    monkeypatch.setattr(torch.nn.functional, "linear", spy)
    hidden_ND = torch.randn(4, 8).bfloat16()
    weight_VD = torch.randn(16, 8).bfloat16()
    build_loss(chunk_loss=False)(hidden_ND, weight_VD, torch.arange(4))
    assert dtypes == [torch.float32]


@pytest.mark.parametrize(
    "layer", [SwiGLU(8, 16), GELUFeedForward(8, 16)], ids=["swiglu", "gelu"]
)
def test_wide_results_are_freed_before_the_last_product(layer: nn.Module) -> None:
    """Oracle: references to the results of the first products; no backward needs them."""
    results: list[weakref.ref[Tensor]] = []
    alive: list[list[bool]] = []

    def note(module: nn.Module, args: object, result: Tensor) -> None:
        results.append(weakref.ref(result))

    def look(module: nn.Module, args: object) -> None:
        alive.append([result() is not None for result in results])

    for name, part in layer.named_children():
        if name == "down_proj":
            part.register_forward_pre_hook(look)
        else:
            part.register_forward_hook(note)
    with torch.no_grad():
        layer(torch.zeros(2, 3, 8))
    assert alive == [[False] * len(results)] and results
