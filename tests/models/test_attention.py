"""Backends of PyTorch's attention, repeated heads, and layouts from the rotation to the output
projection.

CUDA's choices are checked with fake tensors: ``scaled_dot_product_attention`` is replaced by a
record of its arguments.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdptoys.memory import GradientCheckpointing, checkpoint_blocks
from fsdptoys.models import Ops, choose_ops, kernels, use_ops
from fsdptoys.models import attention as attention_module
from fsdptoys.models.attention import (
    BACKENDS,
    attention,
    attention_by,
    chosen_backend,
    masked_attention,
)
from fsdptoys.models.kernels import block_mask, dense_mask
from fsdptoys.models.rotations import Pairs, rotary, turn
from fsdptoys.models.self_attention import Attention
from tests.harness.families import SMALL
from tests.harness.folders import build

EVERY = {"cudnn", "flash", "efficient", "math"}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget compiled functions after a test, which other tests count."""
    yield
    torch._dynamo.reset()


def _enabled() -> set[str]:
    """Backends that PyTorch may choose from at this moment."""
    cuda = torch.backends.cuda
    enabled = {
        "cudnn": cuda.cudnn_sdp_enabled(),
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    return {name for name, is_on in enabled.items() if is_on}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Enabled backends, heads of keys and ``enable_gqa`` of each call of PyTorch's attention."""
    calls: list[Any] = []
    plain = F.scaled_dot_product_attention

    def record(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        calls.append((_enabled(), key.shape[1], options["enable_gqa"]))
        return (
            torch.empty_like(query)
            if query.is_cuda
            else plain(query, key, value, **options)
        )

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    yield calls
    assert _enabled() == EVERY  # contexts are left


def _qkv(
    heads: int, groups: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Tensor]:
    """Views with the head dim moved before positions, as ``Attention`` passes them."""
    return [
        torch.randn(2, 33, n, 16, dtype=dtype, device=device).transpose(1, 2)
        for n in (heads, groups, groups)
    ]


def _values_and_gradients(
    attend: Callable[..., Tensor], leaves: list[Tensor]
) -> list[Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = attend(*leaves)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape))
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("name", ["flash", "math"])
@pytest.mark.parametrize("masks", [False, True])
def test_backends_of_a_cpu_have_the_values_and_gradients_of_the_default(
    name: str, masks: bool
) -> None:
    """Oracle: PyTorch's own choice, bitwise for flash, which it is."""
    torch.manual_seed(0)
    leaves = _qkv(4, 2)
    plain = choose_ops({})
    forced = choose_ops({"attention": name})
    if masks:
        added = dense_mask(
            torch.arange(33).div(9, rounding_mode="floor").expand(2, 33), torch.float32
        )
        both = [
            lambda q, k, v, ops=ops: ops.document_attention.attend(q, k, v, added)
            for ops in (plain, forced)
        ]
    else:
        both = [plain.attention, forced.attention]
    expected, actual = (_values_and_gradients(attend, leaves) for attend in both)
    for one, other in zip(actual, expected, strict=True):
        assert (
            torch.equal(one, other)
            if name == "flash"
            else torch.allclose(one, other, rtol=1e-4, atol=1e-5)
        )


@pytest.mark.parametrize("mode", list(GradientCheckpointing))
@pytest.mark.parametrize("compiles", [False, True])
def test_recomputation_uses_the_backend_of_the_forward(
    mode: GradientCheckpointing,
    compiles: bool,
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: enabled backends of every call, one a layer and one more in a recomputation; loss of
    the default."""
    if compiles:
        monkeypatch.undo()  # the compiler would trace the record
    torch.manual_seed(0)
    model = build(SMALL["llama2"])
    tokens_BT = torch.arange(40).view(2, 20)
    expected = model(tokens_BT).sum().item()
    calls.clear()
    use_ops(model, choose_ops({"attention": "math"}))
    checkpoint_blocks(model.layers, mode)
    if compiles:
        for layer in model.layers:
            layer.compile(
                backend="aot_eager", fullgraph=mode is GradientCheckpointing.none
            )
    loss = model(tokens_BT).sum()
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    if not compiles:
        again = mode is not GradientCheckpointing.none
        assert [enabled for enabled, *_ in calls] == [{"math"}] * len(model.layers) * (
            1 + again
        )


@pytest.mark.parametrize(
    ("heads", "dtype", "masks", "trains", "expected"),
    [
        (4, torch.bfloat16, False, True, (EVERY, 2, True)),
        (2, torch.bfloat16, False, True, (EVERY, 2, False)),
        (4, torch.float32, False, True, (EVERY, 4, False)),
        (4, torch.bfloat16, False, False, (EVERY - {"cudnn"}, 2, True)),
        (4, torch.float32, False, False, (EVERY - {"cudnn"}, 4, False)),
        (4, torch.bfloat16, True, True, (EVERY - {"cudnn"}, 4, False)),
        (4, torch.float32, True, False, (EVERY - {"cudnn"}, 4, False)),
        (4, torch.bfloat16, None, False, (EVERY - {"cudnn"}, 2, True)),
    ],
)
def test_cuda_has_no_cudnn_for_masks_and_evaluation_and_repeats_heads_where_no_kernel_shares_them(
    heads: int,
    dtype: torch.dtype,
    masks: bool | None,
    trains: bool,
    expected: Any,
    calls: list[Any],
) -> None:
    """Oracle: the documented rule; None is a token that sees a cache without a mask."""
    with FakeTensorMode(), nullcontext() if trains else torch.no_grad():
        q, k, v = _qkv(heads, 2, dtype, "cuda")
        if masks is False:
            attention(q, k, v)
        else:
            mask = torch.zeros(33, 33, dtype=dtype, device="cuda") if masks else None
            masked_attention(q, k, v, mask)
    assert calls == [expected]


@pytest.mark.parametrize(
    ("name", "heads"), [("cudnn", 2), ("flash", 2), ("efficient", 4)]
)
def test_chosen_backend_is_the_only_one_on_cuda(
    name: str, heads: int, calls: list[Any]
) -> None:
    """Oracle: enabled backends; the memory-efficient kernel alone does not share heads."""
    with FakeTensorMode():
        attention_by(BACKENDS[name])(*_qkv(4, 2, torch.bfloat16, "cuda"))
    assert calls == [({name}, heads, heads == 2)]


def test_repeated_heads_equal_shared_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: PyTorch's shared heads, values and gradients in float32."""
    leaves = _qkv(6, 2)
    results = []
    for shares in (True, False):
        monkeypatch.setattr(attention_module, "SHARES_ON_CPU", shares)
        results.append(_values_and_gradients(attention, leaves))
    for expected, actual in zip(*results, strict=True):
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_pytorch_names_the_backend_that_it_chooses() -> None:
    """Oracle: the only backends of a CPU; PyTorch refuses others."""
    q, k, v = _qkv(4, 2)
    assert chosen_backend(q, k, v) == "flash"
    assert chosen_backend(q, k, v, torch.zeros(33, 33)) == "flash"
    assert chosen_backend(q, k, v, backends=(BACKENDS["math"],)) == "math"
    with pytest.raises(RuntimeError):
        chosen_backend(q, k, v, backends=(BACKENDS["cudnn"],))


@pytest.mark.parametrize("pairs", list(Pairs))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_keeps_strides_on_cuda_and_rounds_alike_in_both_layouts(
    pairs: Pairs, dtype: torch.dtype
) -> None:
    """Oracle: the contiguous layout of a CPU, bitwise, values and gradients; strides of the input
    on CUDA."""
    cos, sin = Ops().rope_tables(torch.logspace(0, -3, 8), torch.arange(33))
    leaf = _qkv(4, 2, dtype)[0]
    expected = _values_and_gradients(lambda x: rotary(x, cos, sin, pairs), [leaf])

    def transposed(x: Tensor) -> Tensor:
        return turn(
            x.transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1), pairs
        ).transpose(1, 2)

    actual = _values_and_gradients(transposed, [leaf])
    assert all(map(torch.equal, actual, expected))
    assert expected[0].is_contiguous() and actual[0].stride() == leaf.stride()
    with FakeTensorMode():
        x = _qkv(4, 2, dtype, "cuda")[0]
        tables = torch.ones(33, 8, device="cuda"), torch.ones(33, 8, device="cuda")
        assert rotary(x, *tables, pairs).stride() == x.stride()


def test_heads_are_joined_after_attention_on_cuda_without_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the input of the output projection is a view of attention's result, by PyTorch's own
    shape function."""

    def flash(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, True
        )[0]
        return out

    monkeypatch.setattr(F, "scaled_dot_product_attention", flash)
    # A CPU's torch has no random numbers of CUDA
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda _: None)
    views: list[bool] = []
    with torch.no_grad(), FakeTensorMode():
        with torch.device("cuda"):
            layer = Attention(32, 4, 2, 16)
        layer.o_proj.register_forward_pre_hook(
            lambda _, inputs: views.append(inputs[0]._is_view())
        )
        tables = torch.ones(33, 8, device="cuda"), torch.ones(33, 8, device="cuda")
        layer(torch.ones(2, 33, 32, device="cuda"), tables)
    assert views == [True]


def test_compiled_block_masks_are_the_eager_ones_for_many_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: eager ``create_block_mask``; one graph for the first length and one for all
    others."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = functools.cache(functools.partial(torch.compile, backend=counter))
    for length in (130, 257, 300):
        segments_BT = torch.randint(0, 3, (2, length)).sort(dim=1).values
        monkeypatch.setattr(kernels, "_compiles_flex", lambda _: False)
        expected = block_mask(segments_BT, torch.float32).to_dense()
        monkeypatch.setattr(kernels, "_compiles_flex", lambda _: True)
        monkeypatch.setattr(kernels, "_compile", compiled)
        assert torch.equal(block_mask(segments_BT, torch.float32).to_dense(), expected)
    assert counter.frame_count <= 2
