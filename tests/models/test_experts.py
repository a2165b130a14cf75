"""Experts against the formula, token by token."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdptoys.models import grouped
from fsdptoys.models.experts import apply_experts
from fsdptoys.models.grouped import (
    Grouped,
    Looped,
    LoopedFloat32,
    LoopedOneDNN,
    Product,
    choose_product,
    works,
)
from fsdptoys.models.moe import Experts

DIM = 16
FFN_DIM = 8
PRODUCTS = {
    "loop": (Looped(), torch.float64),
    "loop as on every device": (Looped(one_pass_sums=False), torch.float64),
    "padded loop": (Looped(row_multiple=5), torch.float64),
    "loop, float32": (Looped(), torch.float32),
    "loop through float32": (LoopedFloat32(), torch.float32),
    "onednn": (LoopedOneDNN(), torch.float32),
    "padded onednn": (LoopedOneDNN(row_multiple=32), torch.float32),
    "torch's grouped": (Grouped, torch.float32),
}
"""Name → implementation and its most precise dtype; constructed on demand, since torch may lack
it."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""hidden_ND, experts_NK, weights_NK, gate_up_EHD, down_EDF."""


def make_inputs(
    tokens: int,
    top_k: int,
    n_experts: int,
    load: str = "random",
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scores_NE = torch.rand(tokens, n_experts, generator=generator)
    if load == "half the experts":
        scores_NE[:, ::2] -= 1
    elif load == "the same experts":
        scores_NE += torch.arange(n_experts)
    return (
        normal(tokens, DIM).to(dtype).requires_grad_(),
        scores_NE.topk(top_k).indices,
        normal(tokens, top_k).abs().to(dtype).requires_grad_(),
        (normal(n_experts, 2 * FFN_DIM, DIM) / 4).to(dtype).requires_grad_(),
        (normal(n_experts, DIM, FFN_DIM) / 4).to(dtype).requires_grad_(),
    )


def formula(inputs: Inputs, scale_input: bool) -> Tensor:
    """The definition, in the dtype of its inputs."""
    hidden_ND, experts_NK, weights_NK, gate_up_EHD, down_EDF = inputs
    rows = []
    for n in range(len(hidden_ND)):
        out_D = torch.zeros_like(hidden_ND[n])
        for k in range(experts_NK.shape[1]):
            expert = experts_NK[n, k]
            weight = weights_NK[n, k]
            input_D = weight * hidden_ND[n] if scale_input else hidden_ND[n]
            gate_F, up_F = (gate_up_EHD[expert] @ input_D).chunk(2)
            expert_D = down_EDF[expert] @ (F.silu(gate_F) * up_F)
            out_D = out_D + (expert_D if scale_input else weight * expert_D)
        rows.append(out_D)
    return torch.stack(rows)


def value_and_gradients(out_ND: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
    grad_ND = torch.randn(
        out_ND.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    floats = [tensor for tensor in inputs if tensor.requires_grad]
    return out_ND.detach(), *torch.autograd.grad(
        out_ND, floats, grad_ND.to(out_ND.dtype)
    )


def product_of(name: str) -> tuple[Product, torch.dtype]:
    product, dtype = PRODUCTS[name]
    try:
        product = product() if isinstance(product, type) else product
    except AttributeError:
        pytest.skip("this torch has no grouped product")
    if not works(product, "cpu", dtype):
        pytest.skip(f"{name} does not run on this CPU with this torch")
    return product, dtype


def build(inputs: Inputs) -> Experts:
    experts = Experts(DIM, FFN_DIM, inputs[3].shape[0]).to(inputs[3].dtype)
    experts.load_state_dict({"gate_up_proj": inputs[3], "down_proj": inputs[4]})
    return experts


@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize(
    ("tokens", "top_k", "n_experts", "load"),
    [
        (1, 1, 1, "random"),
        (1, 2, 8, "random"),
        (37, 3, 5, "random"),
        (40, 8, 8, "random"),
        (50, 4, 16, "half the experts"),
        (33, 1, 6, "the same experts"),
        (20, 2, 6, "the same experts"),
    ],
)
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_implementation_equals_the_formula(
    name: str, tokens: int, top_k: int, n_experts: int, load: str, scale_input: bool
) -> None:
    """Oracle: the formula token by token in float64; output, and gradients of input, weights and
    both matrices."""
    product, dtype = product_of(name)
    inputs = make_inputs(tokens, top_k, n_experts, load, dtype)
    exact: Inputs = tuple(
        t.detach().double().requires_grad_() if t.requires_grad else t for t in inputs
    )  # type: ignore[assignment]
    expected = value_and_gradients(formula(exact, scale_input), exact)
    actual = value_and_gradients(
        apply_experts(*inputs, product, scale_input=scale_input), inputs
    )
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for result, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(
            result.double(), reference, rtol=tolerance, atol=tolerance
        )
    unused = torch.ones(n_experts, dtype=torch.bool)
    unused[inputs[1].flatten()] = False
    assert not actual[3][unused].any()
    assert not actual[4][unused].any()


@pytest.mark.parametrize("index", range(4))
def test_each_gradient_can_be_computed_alone(index: int) -> None:
    """Oracle: the same gradient computed together with the others."""
    inputs = make_inputs(11, 2, 4)
    expected = value_and_gradients(apply_experts(*inputs, Looped()), inputs)[1 + index]
    floats = [tensor for tensor in inputs if tensor.requires_grad]
    for tensor in floats:
        tensor.requires_grad_(tensor is floats[index])
    (actual,) = value_and_gradients(apply_experts(*inputs, Looped()), inputs)[1:]
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("scale_input", [False, True])
def test_bfloat16_error_is_at_most_twice_that_of_the_plain_formula(
    scale_input: bool,
) -> None:
    """Oracle: the formula in float64; the yardstick is the error of the same formula computed in
    bfloat16."""
    inputs = make_inputs(64, 4, 8, dtype=torch.bfloat16)
    exact: Inputs = tuple(
        t.detach().double().requires_grad_() if t.requires_grad else t for t in inputs
    )  # type: ignore[assignment]
    expected = value_and_gradients(formula(exact, scale_input), exact)
    plain = value_and_gradients(formula(inputs, scale_input), inputs)
    product = choose_product("cpu", torch.bfloat16)
    actual = value_and_gradients(
        apply_experts(*inputs, product, scale_input=scale_input), inputs
    )
    for result, loop, reference in zip(actual, plain, expected, strict=True):
        assert (result.double() - reference).norm() <= 2 * (
            loop.double() - reference
        ).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_results_are_bitwise_reproducible(dtype: torch.dtype) -> None:
    """Oracle: its own first run; repeated at other addresses, with deterministic algorithms, and in
    autocast.

    Addresses are multiples of 16 bytes, as from allocators and FSDP; MKL's float64 matmuls differ
    otherwise.
    """
    inputs = make_inputs(70, 3, 6, dtype=dtype)
    product = choose_product("cpu", dtype)
    first = value_and_gradients(apply_experts(*inputs, product), inputs)
    torch.use_deterministic_algorithms(True)
    try:
        for shift in (0, 16 // dtype.itemsize, 32 // dtype.itemsize):
            moved = []
            for tensor in inputs:
                start = shift if tensor.is_floating_point() else 0
                memory = torch.empty(tensor.numel() + start, dtype=tensor.dtype)[
                    start:
                ].view(tensor.shape)
                moved.append(
                    memory.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)
                )
            with torch.autocast(
                "cpu", torch.bfloat16 if dtype != torch.bfloat16 else torch.float16
            ):
                again = value_and_gradients(
                    apply_experts(*moved, product), tuple(moved)
                )  # type: ignore[arg-type]
            for a, b in zip(first, again, strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)


def test_saved_tensors_have_the_documented_size() -> None:
    """Oracle: the formula: N·D + N·K·(2F + 1) floats besides the parameters, and 3·N·K ints; none
    in no_grad."""
    tokens = 48
    top_k = 2
    inputs = make_inputs(tokens, top_k, 4)
    experts = build(inputs)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        with torch.no_grad():
            experts(*inputs[:3])
        assert not saved
        experts(*inputs[:3])
    floats = [
        t for t in saved if t.is_floating_point() and not isinstance(t, nn.Parameter)
    ]
    assert sum(t.numel() for t in floats) == tokens * DIM + tokens * top_k * (
        2 * FFN_DIM + 1
    )
    assert (
        sum(t.numel() for t in saved if not t.is_floating_point()) == 3 * tokens * top_k
    )


def test_uneven_loads_allocate_no_larger_tensors() -> None:
    """Oracle: the same layer with even loads; the largest tensor of the forward and backward, by a
    dispatch mode."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            self.numel = max(
                [
                    self.numel,
                    *(
                        t.numel()
                        for t in torch.utils._pytree.tree_leaves(out)
                        if isinstance(t, Tensor)
                    ),
                ]
            )
            return out

    sizes = []
    for load in ("random", "the same experts"):
        inputs = make_inputs(256, 1, 8, load)
        with Largest() as largest:
            value_and_gradients(apply_experts(*inputs, Looped()), inputs)
        sizes.append(largest.numel)
    assert sizes[0] == sizes[1]


def test_empty_batch_gives_zero_gradients() -> None:
    """Oracle: zeros; a rank may get an empty batch, and its parameters still need a gradient."""
    products: list[Product] = [Looped(), LoopedOneDNN(32)]
    if hasattr(torch, "_grouped_mm"):  # from torch 2.8 on
        products.append(Grouped())
    for product in products:
        inputs = make_inputs(0, 2, 4, dtype=torch.float32)
        out_ND, *grads = value_and_gradients(apply_experts(*inputs, product), inputs)
        assert out_ND.shape == (0, DIM)
        assert not any(grad.any() for grad in grads)


def test_meta_device_gives_shapes() -> None:
    """Oracle: the documented shapes; a model can be planned without memory."""
    with torch.device("meta"):
        experts = Experts(DIM, FFN_DIM, 4)
        hidden_ND = torch.empty(6, DIM, requires_grad=True)
        out_ND = experts(
            hidden_ND, torch.empty(6, 2, dtype=torch.int64), torch.empty(6, 2)
        )
        out_ND.sum().backward()
    assert out_ND.shape == hidden_ND.grad.shape == (6, DIM)
    assert experts.gate_up_proj.grad.shape == (4, 2 * FFN_DIM, DIM)


def test_invalid_expert_ids_and_mixed_dtypes_are_refused() -> None:
    """Oracle: the expected messages."""
    hidden_ND, experts_NK, weights_NK, *matrices = make_inputs(3, 2, 4)
    with pytest.raises(ValueError, match="give ids below 4"):
        apply_experts(hidden_ND, experts_NK + 4, weights_NK, *matrices, Looped())
    with pytest.raises(ValueError, match=r"hidden_ND is torch\.float32"):
        build((hidden_ND, experts_NK, weights_NK, *matrices))(
            hidden_ND.float(), experts_NK, weights_NK
        )


def test_probe_rejects_wrong_and_raising_implementations() -> None:
    """Oracle: the plain loop passes; one with a wrong expert and one that raises do not."""

    class Wrong(Looped):
        def linear(self, a_MI, weight_OI, piece, out_MO=None):  # type: ignore[no-untyped-def]
            return super().linear(a_MI, weight_OI, piece, out_MO) + (piece.experts == 2)

    class Raises(Looped):
        def outer(self, a_MO, b_MI, piece, out_OI):  # type: ignore[no-untyped-def]
            raise NotImplementedError("no kernel")

    assert [
        works(product, "cpu", torch.float32)
        for product in (Looped(), Wrong(), Raises())
    ] == [
        True,
        False,
        False,
    ]


@pytest.mark.skipif(
    not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product"
)
@pytest.mark.parametrize(
    ("dim", "ffn_dim", "implementation"),
    [(64, 32, Grouped), (64, 50, Looped), (36, 22, Looped)],
)
def test_widths_unsupported_by_grouped_mm_use_the_loop(
    dim: int, ffn_dim: int, implementation: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: torch itself, which refuses rows that are not aligned to 16 bytes."""
    monkeypatch.setattr(grouped, "_fastest", lambda *_: Grouped())
    assert type(choose_product("cpu", torch.float32, dim, ffn_dim)) is implementation
    matrices = torch.randn(3, 2 * ffn_dim, dim), torch.randn(3, dim, ffn_dim)
    tokens = torch.randn(8, dim), torch.arange(8).view(8, 1) % 3, torch.ones(8, 1)
    with (
        pytest.raises(RuntimeError, match="strides")
        if implementation is Looped
        else nullcontext()
    ):
        apply_experts(*tokens, *matrices, Grouped())


@pytest.mark.parametrize(
    ("capability", "dtype", "implementation"),
    [
        ((9, 0), torch.bfloat16, Grouped),
        ((10, 3), torch.bfloat16, Grouped),
        ((8, 0), torch.bfloat16, Looped),
        ((12, 0), torch.bfloat16, Looped),
        ((9, 0), torch.float32, Looped),
    ],
)
def test_cuda_uses_the_grouped_matmul_only_where_it_is_one_kernel(
    capability: tuple[int, int],
    dtype: torch.dtype,
    implementation: type,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: PyTorch's condition for its kernel; elsewhere its loop waits for the device in every
    call."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(grouped, "works", lambda *_: True)
    monkeypatch.setattr(Grouped, "__init__", lambda _: None)  # torch 2.7 has none
    assert type(grouped._fastest.__wrapped__("cuda", dtype)) is implementation
