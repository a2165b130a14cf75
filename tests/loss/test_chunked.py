"""The head's loss: the chunked loss has the values of the plain one, and the documented amount of
work."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptoys.loss import build_loss, cross_entropy_sum, head_products, softmax
from fsdptoys.loss import chunked as chunked_loss
from fsdptoys.loss.chunked import auto_chunk_tokens
from fsdptoys.loss.objective import IGNORE_INDEX, Objective

PLAIN = Objective()
SMOOTHED = Objective(label_smoothing=0.1)
Z_LOSS = Objective(z_loss_coef=1e-2)
BOTH = Objective(label_smoothing=0.1, z_loss_coef=1e-2)
N = 50
D = 24
V = 131
UPSTREAM = 0.3


def make_inputs(
    n: int = N,
    d: int = D,
    v: int = V,
    dtype: torch.dtype = torch.float32,
    ignored: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(n, d, generator=generator).to(dtype).requires_grad_()
    weight_VD = (
        (torch.randn(v, d, generator=generator) * 0.3).to(dtype).requires_grad_()
    )
    labels_N = torch.randint(v, (n,), generator=generator)
    labels_N[torch.rand(n, generator=generator) < ignored] = IGNORE_INDEX
    return hidden_ND, weight_VD, labels_N


def outcome(
    loss_fn: Callable[..., Tensor],
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
) -> list[Tensor]:
    """Loss and both gradients, the loss multiplied by something before the backward as in
    training."""
    hidden_ND, weight_VD = (
        x.detach().clone().requires_grad_() for x in (hidden_ND, weight_VD)
    )
    loss = loss_fn(hidden_ND, weight_VD, labels_N)
    (loss * UPSTREAM).backward()
    assert hidden_ND.grad is not None and weight_VD.grad is not None
    return [loss.detach(), hidden_ND.grad, weight_VD.grad]


def exact(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, objective: Objective = PLAIN
) -> list[Tensor]:
    """The same in float64, from the definition."""

    def loss_fn(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
        valid = labels_N != IGNORE_INDEX
        logits = hidden_ND[valid] @ weight_VD.T
        labels = labels_N[valid]
        shares = torch.full_like(logits, objective.label_smoothing / logits.shape[1])
        shares[torch.arange(len(labels)), labels] += 1 - objective.label_smoothing
        logsumexp = logits.exp().sum(1).log()
        return (
            shares * (logsumexp[:, None] - logits)
        ).sum() + objective.z_loss_coef * (logsumexp**2).sum()

    return outcome(loss_fn, hidden_ND.double(), weight_VD.double(), labels_N)


def relative_errors(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [
        ((a.double() - b.double()).norm() / b.double().norm()).item()
        for a, b in zip(actual, expected, strict=True)
    ]


def on_device_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the path of an accelerator without Triton on the CPU."""
    monkeypatch.setattr(
        chunked_loss, "choose_products", lambda *_: head_products.DeviceProducts()
    )
    monkeypatch.setattr(chunked_loss, "_leaves_out_rows", lambda _: False)
    monkeypatch.setattr(softmax, "softmax_cpu_", softmax.softmax_device_)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("device_path", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(
    "objective",
    [PLAIN, Objective(label_smoothing=0.1), Objective(z_loss_coef=1e-2), BOTH],
    ids=str,
)
@pytest.mark.parametrize("chunk_tokens", [None, 1, 16, N])
def test_float32_loss_agrees_to_1e_6_and_gradients_to_1e_5(
    chunk_tokens: int | None,
    objective: Objective,
    ignored: float,
    device_path: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: F.cross_entropy(F.linear(h, w).float(), y) and autograd, and the definition in
    float64."""
    if device_path:
        on_device_path(monkeypatch)
    monkeypatch.setattr(head_products, "BLOCK_CLASSES", 50)
    for name in ("CPU_BLOCK_BYTES", "DEVICE_BLOCK_BYTES"):
        monkeypatch.setattr(softmax, name, 6 * V * 4)
    inputs = make_inputs(ignored=ignored)
    actual = outcome(build_loss(True, chunk_tokens, objective=objective), *inputs)
    for expected in (
        outcome(build_loss(False, objective=objective), *inputs),
        exact(*inputs, objective),
    ):
        torch.testing.assert_close(actual[0], expected[0].float(), rtol=1e-6, atol=0)
        for gradient, expected_gradient in zip(actual[1:], expected[1:], strict=True):
            torch.testing.assert_close(
                gradient, expected_gradient.float(), rtol=1e-5, atol=1e-5 * UPSTREAM
            )


@pytest.mark.parametrize("device_path", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize("objective", [PLAIN, BOTH], ids=["plain", "both"])
def test_bf16_error_is_at_most_1_5_times_that_of_the_plain_loss(
    objective: Objective, device_path: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: float64; eight chunks, float32 sum."""
    if device_path:
        on_device_path(monkeypatch)
    inputs = make_inputs(1024, 64, 2500, torch.bfloat16)
    expected = exact(*inputs, objective)
    plain = relative_errors(
        outcome(build_loss(False, objective=objective), *inputs), expected
    )
    errors = relative_errors(
        outcome(build_loss(True, 128, objective=objective), *inputs), expected
    )
    assert errors[0] <= max(1.5 * plain[0], 1e-6)
    assert errors[1] <= 1.5 * plain[1]
    assert errors[2] <= 1.5 * plain[2]


@pytest.mark.parametrize("chunks, stated", [(1, 0.9), (8, 1.25), (32, 1.9)])
def test_bf16_accumulation_error_grows_with_chunks_as_documented(
    chunks: int, stated: float
) -> None:
    """Oracle: float64; the error of the weight's gradient relative to that of the plain loss."""
    inputs = make_inputs(1024, 64, 2500, torch.bfloat16)
    expected = exact(*inputs)
    plain = relative_errors(outcome(cross_entropy_sum, *inputs), expected)
    errors = relative_errors(
        outcome(build_loss(True, 1024 // chunks, torch.bfloat16), *inputs), expected
    )
    assert errors[2] == pytest.approx(stated * plain[2], rel=0.15)
    assert (
        errors[:2]
        == relative_errors(
            outcome(build_loss(True, 1024 // chunks), *inputs), expected
        )[:2]
    )


def test_bf16_accumulation_supports_a_float32_weight() -> None:
    """Oracle: the plain loss, to the precision of bf16."""
    inputs = make_inputs()
    actual, expected = (
        outcome(f, *inputs)
        for f in (build_loss(True, 16, torch.bfloat16), cross_entropy_sum)
    )
    assert actual[2].dtype == torch.float32
    errors = relative_errors(actual, expected)
    assert errors[0] < 1e-6 and errors[1] < 1e-5 and 1e-5 < errors[2] < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("private_function", [True, False])
def test_retained_graph_gives_the_same_gradients(
    dtype: torch.dtype, private_function: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: one backward of a fresh graph, bitwise; with and without PyTorch's report that the
    graph is retained."""
    if not private_function:
        monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    inputs = make_inputs(dtype=dtype)
    loss_fn = build_loss(True, 16)
    expected = outcome(loss_fn, *inputs)[1:]
    loss = loss_fn(*inputs) * UPSTREAM
    for keeps in (True, True, False):
        gradients = torch.autograd.grad(loss, inputs[:2], retain_graph=keeps)
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_second_derivative_is_refused() -> None:
    """Oracle: the message, which suggests the plain loss."""
    hidden_ND, weight_VD, labels_N = make_inputs()
    loss = build_loss(True, 16)(hidden_ND, weight_VD, labels_N)
    with pytest.raises(
        RuntimeError,
        match=r"second derivative; use the plain loss, memory\.chunk_loss=false",
    ):
        torch.autograd.grad(loss, hidden_ND, create_graph=True)


class Work(TorchDispatchMode):
    """Counts multiply-adds of matmuls, and records the largest tensor returned by an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply_adds = 0
        self.largest = 0
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_", "_linear_pointwise"):
            a = args[1] if name.startswith("addmm") else args[0]
            self.multiply_adds += a.shape[0] * a.shape[1] * result.shape[1]
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        self.calls[name] += 1
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "needs, products",
    [((1, 1), 3), ((1, 0), 2), ((0, 1), 2), ((0, 0), 1), ("no_grad", 1)],
)
def test_unneeded_gradients_and_ignored_labels_cost_no_matmul(
    needs: Any, products: int, dtype: torch.dtype
) -> None:
    """Oracle: the multiply-adds of the valid rows; no tensor is nearly as large as the logits."""
    hidden_ND, weight_VD, labels_N = make_inputs(n=200, dtype=dtype, ignored=0.5)
    for tensor, needs_grad in zip(
        (hidden_ND, weight_VD), (1, 1) if needs == "no_grad" else needs, strict=True
    ):
        tensor.requires_grad_(bool(needs_grad))
    with Work() as work, torch.set_grad_enabled(needs != "no_grad"):
        loss = build_loss(True, 16)(hidden_ND, weight_VD, labels_N)
        if loss.requires_grad:
            loss.backward()
    assert loss.requires_grad == (products > 1)
    valid = int((labels_N != IGNORE_INDEX).sum())
    assert work.multiply_adds == products * valid * D * V
    assert work.largest <= max(200 * D, V * D, 16 * V)
    for tensor, needs_grad in zip(
        (hidden_ND, weight_VD), (0, 0) if needs == "no_grad" else needs, strict=True
    ):
        assert (tensor.grad is not None) == bool(needs_grad)


def test_ignored_rows_are_not_read() -> None:
    """Oracle: the batch without them; NaN in their hidden states would propagate through every
    matmul."""
    hidden_ND, weight_VD, labels_N = make_inputs(ignored=0.4)
    valid = labels_N != IGNORE_INDEX
    loss, hidden_gradient_ND, weight_gradient_VD = outcome(
        build_loss(True, 7),
        hidden_ND.detach().masked_fill(~valid[:, None], math.nan),
        weight_VD,
        labels_N,
    )
    expected = outcome(
        build_loss(True, 7), hidden_ND[valid], weight_VD, labels_N[valid]
    )
    assert torch.equal(loss, expected[0])
    assert torch.equal(hidden_gradient_ND[valid], expected[1])
    assert not hidden_gradient_ND[~valid].any()
    assert torch.equal(weight_gradient_VD, expected[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_tokens", [None, 16])
def test_chunked_loss_never_synchronizes_with_the_device(
    chunk_tokens: int | None, grad_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Oracle: the meta device, whose values cannot be read; reading one would synchronize the
    host."""
    inputs = [x.detach().to("meta") for x in make_inputs(dtype=dtype, ignored=0.4)]
    with pytest.raises((RuntimeError, NotImplementedError)):
        inputs[2].sum().item()
    loss, hidden_gradient_ND, weight_gradient_VD = outcome(
        build_loss(True, chunk_tokens, grad_dtype, BOTH), *inputs
    )
    assert (loss.dtype, hidden_gradient_ND.dtype, weight_gradient_VD.dtype) == (
        torch.float32,
        dtype,
        dtype,
    )
    assert (hidden_gradient_ND.shape, weight_gradient_VD.shape) == ((N, D), (V, D))


@pytest.mark.parametrize(
    "n_tokens, weight, device, sum_bytes, expected",
    [
        (4096, (32000, 1024, torch.bfloat16), "cpu", 32000 * 1024 * 4, 512),
        (4096, (32000, 1024, torch.float32), "cpu", 0, 512),
        (4096, (256, 64, torch.float32), "cpu", 0, 4096),
        (2048, (32000, 1024, torch.bfloat16), "cpu", 32000 * 1024 * 4, 2048),
        (4096, (128256, 4096, torch.bfloat16), "meta", 128256 * 4096 * 4, 4096),
        (20000, (128256, 4096, torch.bfloat16), "meta", 128256 * 4096 * 4, 2016),
        (20000, (32000, 4096, torch.bfloat16), "meta", 0, 4000),
        (0, (32000, 1024, torch.bfloat16), "cpu", 32000 * 1024 * 4, 1),
    ],
)
def test_auto_chunks_follow_the_documented_rule(
    n_tokens: int,
    weight: tuple[int, int, torch.dtype],
    device: str,
    sum_bytes: int,
    expected: int,
) -> None:
    """Oracle: the rule, computed by hand; the meta device stands for accelerators."""
    vocab_size, dim, dtype = weight
    weight_VD = torch.empty(1, device=device, dtype=dtype).expand(vocab_size, dim)
    assert auto_chunk_tokens(n_tokens, weight_VD, sum_bytes) == expected
