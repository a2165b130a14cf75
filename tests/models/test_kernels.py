"""Each implementation of an operation compared with the plain one: values, gradients, dtypes, saved
tensors.

torch_npu's are called through stand-ins of its operators (``tests/harness/npu_stand_ins.py``); the
compiled ones are compiled for this CPU.
"""

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks

from fsdptoys.loss import cross_entropy_sum
from fsdptoys.memory import GradientCheckpointing, checkpoint_blocks
from fsdptoys.memory.activation_checkpointing import SAVED_OPERATORS
from fsdptoys.models import Ops, choose_ops, kernels, npu_kernels, use_ops
from fsdptoys.models.grouped import Looped
from fsdptoys.models.kernels import IMPLEMENTATIONS
from fsdptoys.models.rotations import Pairs
from tests.harness.families import SMALL
from tests.harness.folders import build
from tests.harness.npu_stand_ins import CALLS, DEVICE, npu_operators

NPU = {
    operation: "npu" for operation, names in IMPLEMENTATIONS.items() if "npu" in names
}
COMPILED = {
    operation: "compiled"
    for operation, names in IMPLEMENTATIONS.items()
    if "compiled" in names
}


@pytest.fixture(autouse=True, scope="module")
def stand_ins() -> Iterator[None]:
    """Have torch_npu's operators in this module."""
    with npu_operators():
        yield


def _tables(length: int, width: int) -> tuple[Tensor, Tensor]:
    return Ops().rope_tables(torch.logspace(0, -3, width // 2), torch.arange(length))


def _qkv(batch: int, heads: int, groups: int, length: int, width: int) -> list[Tensor]:
    """Inputs as ``Attention`` passes them: views with the head dim moved before positions."""
    return [
        torch.randn(batch, length, n, width).transpose(1, 2)
        for n in (heads, groups, groups)
    ]


CASES: dict[str, tuple[str, Callable[[], list[Tensor]], tuple[Any, ...]]] = {
    "attention": ("attention", lambda: _qkv(2, 4, 4, 17, 16), ()),
    "attention, shared heads, odd length": (
        "attention",
        lambda: _qkv(2, 6, 2, 33, 10),
        (),
    ),
    "attention, one token": ("attention", lambda: _qkv(1, 2, 1, 1, 8), ()),
    "attention, more heads than the kernel takes": (
        "attention",
        lambda: _qkv(1, 258, 258, 3, 4),
        (),
    ),
    "norm of the stream": (
        "rms_norm",
        lambda: [torch.randn(2, 17, 24), torch.randn(24)],
        (1e-5,),
    ),
    "norm of heads": (
        "rms_norm",
        lambda: [torch.randn(2, 17, 4, 10), torch.randn(10)],
        (1e-6,),
    ),
    "norm without a weight": (
        "rms_norm",
        lambda: [torch.randn(2, 17, 4, 10).transpose(1, 2)],
        (None, 1e-5),
    ),
    "halves": (
        "rotary",
        lambda: _qkv(2, 4, 2, 17, 10)[:1],
        (*_tables(17, 10), Pairs.halves),
    ),
    "neighbors": (
        "rotary",
        lambda: _qkv(2, 4, 2, 17, 10)[:1],
        (*_tables(17, 10), Pairs.neighbors),
    ),
    "halves, many sequences": (
        "rotary",
        lambda: [torch.randn(1000, 1, 3, 4)],
        (*_tables(3, 4), Pairs.halves),
    ),
    "neighbors, many heads": (
        "rotary",
        lambda: [torch.randn(40, 25, 3, 4)],
        (*_tables(3, 4), Pairs.neighbors),
    ),
    "gate": ("swiglu", lambda: [torch.randn(2, 17, 22), torch.randn(2, 17, 22)], ()),
}
"""Case → operation, its differentiable arguments, the others."""


def _run(
    function: Callable[..., Tensor], leaves: list[Tensor], rest: tuple[Any, ...]
) -> list[Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = function(*leaves, *rest)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(out))
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(grads) == len(leaves)
    return [out.detach(), *grads]


VARIANTS: list[Any] = [
    ("npu", case, dtype) for case in CASES for dtype in (torch.float32, torch.bfloat16)
]
VARIANTS += [
    ("compiled", case, torch.float32)
    for case in ("norm of the stream", "halves", "gate")
]
VARIANTS += [
    pytest.param("compiled", case, torch.float32, marks=pytest.mark.extended)
    for case in ("norm without a weight", "neighbors")
]
"""Few of them are compiled, since each takes seconds."""


@pytest.mark.parametrize(("name", "case", "dtype"), VARIANTS)
def test_implementations_have_the_values_and_gradients_of_the_plain_one(
    name: str, case: str, dtype: torch.dtype
) -> None:
    """Oracle: the plain function, to a few roundings of the dtype, which all results have.

    Where the derivative is zero, as that of a softmax over one token, either may return a rounding
    of the terms.
    """
    operation, make, rest = CASES[case]
    torch.manual_seed(0)
    leaves = [leaf.to(DEVICE, dtype) for leaf in make()]
    rest = tuple(
        argument.to(DEVICE) if isinstance(argument, Tensor) else argument
        for argument in rest
    )
    plain = _run(IMPLEMENTATIONS[operation]["torch"], leaves, rest)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for actual, expected in zip(
        _run(IMPLEMENTATIONS[operation][name], leaves, rest), plain, strict=True
    ):
        assert (
            actual.dtype == expected.dtype == dtype and actual.shape == expected.shape
        )
        assert (actual.float() - expected.float()).norm() <= tolerance * max(
            expected.float().norm(), 0.1
        )


def test_norm_with_a_weight_of_another_dtype_falls_back_to_pytorch() -> None:
    """Oracle: the plain function bitwise; torch_npu's kernel refuses such a weight, and so does its
    stand-in."""
    x = torch.randn(3, 8, dtype=torch.bfloat16).to(DEVICE)
    weight = torch.randn(8).to(DEVICE)
    assert torch.equal(
        npu_kernels.rms_norm(x, weight, 1e-5), F.rms_norm(x, (8,), weight, 1e-5)
    )


@pytest.mark.parametrize(
    ("operation", "name", "count"),
    [
        ("rotary", "npu", 0),
        ("swiglu", "torch", 3),
        ("swiglu", "npu", 2),
        ("rms_norm", "npu", 1),
        pytest.param("rotary", "compiled", 0, marks=pytest.mark.extended),
        pytest.param("swiglu", "compiled", 2, marks=pytest.mark.extended),
        pytest.param("rms_norm", "compiled", 1, marks=pytest.mark.extended),
    ],
)
def test_kernels_save_the_documented_number_of_tensors(
    operation: str, name: str, count: int
) -> None:
    """Oracle: tensors saved by autograd, in sizes of the input; tables, weights and statistics are
    smaller."""
    x = torch.randn(2, 4, 128, 16).to(DEVICE).requires_grad_()
    cos, sin = (table.to(DEVICE) for table in _tables(128, 16))
    arguments: dict[str, tuple[Any, ...]] = {
        "rotary": (x * 1, cos, sin, Pairs.halves),
        "swiglu": (x * 1, x * 2),
        "rms_norm": (x * 1, torch.randn(16).to(DEVICE), 1e-5),
    }
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    function = IMPLEMENTATIONS[operation][name]
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = function(*arguments[operation])
    assert out.requires_grad
    size = x.untyped_storage().nbytes()
    # Two tables of half a head's width are small compared with all heads.
    assert sum(nbytes // size for nbytes in saved.values()) == count
    assert sum(nbytes % size for nbytes in saved.values()) <= size / 4


def test_wrong_grouped_matmul_falls_back_to_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: an operator that forgets empty groups; callers get one matmul per group."""
    right = npu_kernels.operator("npu_grouped_matmul")
    monkeypatch.setattr(
        npu_kernels,
        "operator",
        lambda name: lambda *args, **kwargs: [right(*args, **kwargs)[0] + 1],
    )
    npu_kernels._tried.cache_clear()
    assert type(npu_kernels.choose_product(DEVICE.type, torch.float32, 16)) is Looped
    npu_kernels._tried.cache_clear()


def _loss_and_gradients(
    case: str, names: dict[str, str], dtype: torch.dtype, mode: GradientCheckpointing
) -> Any:
    torch.manual_seed(0)
    model = build(SMALL[case]).to(dtype)
    for name, param in model.named_parameters():
        torch.nn.init.normal_(param, 1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    model.to(DEVICE)
    use_ops(model, choose_ops(names))
    checkpoint_blocks(model.layers, mode)
    tokens_BT = torch.randint(
        0, 96, (2, 41), generator=torch.Generator().manual_seed(1)
    ).to(DEVICE)
    loss = model(tokens_BT, tokens_BT.roll(-1, 1), cross_entropy_sum)
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    "mode", [GradientCheckpointing.none, GradientCheckpointing.selective]
)
@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("llama4", NPU),
        ("qwen3_moe", NPU),
        ("gpt2", NPU),
        ("llama3 scaled tied", COMPILED),
        pytest.param("llama3 scaled tied", NPU, marks=pytest.mark.extended),
    ],
    ids=["llama4 npu", "qwen3_moe npu", "gpt2 npu", "llama3 compiled", "llama3 npu"],
)
def test_model_has_equal_loss_and_gradients_with_other_kernels(
    case: str,
    names: dict[str, str],
    mode: GradientCheckpointing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the same model with PyTorch's own, loss and all gradients in float32; experts,
    chunks, bare norms too.

    Compiled kernels go through the compiler's decompositions, but not to machine code, as each
    operation does alone above.
    """
    backend = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(kernels, "_compile", functools.cache(backend))
    operators = (
        *SAVED_OPERATORS["attention"],
        torch.ops.npu.npu_fusion_attention.default,
    )
    monkeypatch.setitem(SAVED_OPERATORS, "attention", operators)
    loss, grads = _loss_and_gradients(
        case, {}, torch.float32, GradientCheckpointing.none
    )
    found_loss, found_grads = _loss_and_gradients(case, names, torch.float32, mode)
    assert found_loss.item() == pytest.approx(loss.item(), rel=1e-5)
    whole_norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    for name, grad in grads.items():  # those of keys' biases are zero up to rounding
        assert (
            found_grads[name] - grad
        ).norm() <= 1e-4 * grad.norm() + 1e-7 * whole_norm, name


@pytest.mark.parametrize(
    ("mode", "attended", "multiplied"),
    [
        (GradientCheckpointing.none, 1, 6),
        (GradientCheckpointing.full, 2, 8),
        (GradientCheckpointing.selective, 1, 6),
    ],
)
def test_selective_checkpointing_recomputes_neither_attention_nor_matmuls(
    mode: GradientCheckpointing,
    attended: int,
    multiplied: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: calls per layer, by hand: one attention; two expert matmuls in the forward, four in
    the backward."""
    for name, operator in (
        ("attention", "npu_fusion_attention"),
        ("grouped_mm", "npu_grouped_matmul"),
    ):
        operators = (*SAVED_OPERATORS[name], getattr(torch.ops.npu, operator).default)
        monkeypatch.setitem(SAVED_OPERATORS, name, operators)
    # Probes the matmul
    _loss_and_gradients("qwen3_moe", NPU, torch.float32, GradientCheckpointing.none)
    CALLS.clear()
    _loss_and_gradients("qwen3_moe", NPU, torch.float32, mode)
    layers = SMALL["qwen3_moe"].n_layers
    assert CALLS["npu_fusion_attention"] == attended * layers
    assert CALLS["npu_grouped_matmul"] == multiplied * layers


def test_selective_checkpointing_saves_the_operators_of_torch_npu() -> None:
    """Oracle: a process in which they exist before ``memory`` is imported, as with the autoloaded
    torch_npu."""
    program = """
from tests.harness.npu_stand_ins import CALLS, DEVICE, IS_REAL, npu_operators
with npu_operators():
    import torch
    from fsdptoys.memory.activation_checkpointing import SAVED_OPERATORS
    assert torch.ops.npu.npu_fusion_attention.default in SAVED_OPERATORS["attention"]
    assert torch.ops.npu.npu_grouped_matmul.default in SAVED_OPERATORS["grouped_mm"]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_layers_of_two_models_have_their_own_kernels() -> None:
    """Oracle: the stand-ins' calls: one model's kernels do not change the other's, and can be
    removed."""
    tokens_BT = torch.zeros(1, 8, dtype=torch.int64, device=DEVICE)
    one, other = (build(SMALL["qwen3"]).to(DEVICE) for _ in range(2))
    use_ops(one, choose_ops(NPU))
    CALLS.clear()
    other(tokens_BT)
    assert not CALLS
    one(tokens_BT)
    # With two norms each and one of queries and of keys, and one after all
    layers = SMALL["qwen3"].n_layers
    assert dict(CALLS) == {
        "npu_fusion_attention": layers,
        "npu_rms_norm": 4 * layers + 1,
        "npu_rotary_mul": 2 * layers,
        "npu_swiglu": layers,
    }
    use_ops(one, choose_ops({}))
    CALLS.clear()
    one(tokens_BT)
    assert not CALLS


def test_compiled_kernels_join_the_graph_of_a_compiled_block() -> None:
    """Oracle: the compiler's own count: one graph that includes the functions, and the same
    result."""
    model = build(SMALL["qwen3"])
    tokens_BT = torch.zeros(1, 8, dtype=torch.int64)
    hidden = model.embed(tokens_BT, torch.arange(8))
    rotations = model.rotations(torch.arange(8))
    expected = model.layers[0](hidden, rotations)
    use_ops(model, choose_ops(COMPILED))
    counter = CompileCounterWithBackend("aot_eager")
    actual = torch.compile(model.layers[0], backend=counter, fullgraph=True)(
        hidden, rotations
    )
    assert counter.frame_count == 1
    assert (actual - expected).norm() <= 1e-5 * expected.norm()
