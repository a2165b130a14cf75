"""torch_npu's operators on a CPU: the schemas of its wheel, computed by plain matmuls.

They are registered with PyTorch's dispatcher as torch_npu registers its own, with a gradient where
torch_npu has one, and refuse the dtypes, layouts and lengths that its documentation excludes. So
tests check how they are called. Where the real torch_npu is imported (over a stub of CANN,
``tests/torch_npu``), its schemas and its autograd are the real ones, and only the device's
computation is replaced. The hardware's results are not tested: no test here runs on an NPU.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fsdptoys.models import npu_kernels

SCHEMAS = {
    "npu_fusion_attention": (
        "(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, "
        "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, "
        "float scale=1., float keep_prob=1., "
        "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, "
        "int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, "
        "int sparse_mode=0, bool gen_mask_parallel=True, "
        'bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, '
        "int seed=0, int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
    ),
    "npu_rms_norm": "(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_rotary_mul": (
        "(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half', Tensor? rotate=None) -> "
        "Tensor"
    ),
    "npu_swiglu": "(Tensor input, int dim=-1) -> Tensor",
    "npu_grouped_matmul": (
        "(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? "
        "offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? "
        "per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
        "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? "
        "split_item=0, int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? "
        "tuning_config=None, int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, "
        "int? scale_dtype=None, int? per_token_scale_dtype=None) -> Tensor[]"
    ),
}
"""As ``libtorch_npu.so`` of torch_npu 2.13.0 holds them."""


IS_REAL = torch._C._dispatch_has_kernel("npu::npu_rms_norm")
"""Whether torch_npu is installed."""
DEVICE = torch.device("npu", 0) if IS_REAL else torch.device("cpu")
"""Device of the operators' tensors."""

CALLS: Counter[str] = Counter()
"""Operator → number of calls."""


def _count(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    CALLS[name] += 1
    return function(*args, **kwargs)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention aligned to the upper left corner, as with ``sparse_mode=2``."""
    heads = query.shape[1]
    groups = key.shape[1]
    length = query.shape[2]
    keys, values = (
        x.float().repeat_interleave(heads // groups, dim=1) for x in (key, value)
    )
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query.float() @ keys.transpose(2, 3) * scale).masked_fill(
        hidden, -torch.inf
    )
    return (scores.softmax(-1) @ values).to(query.dtype)


def _fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *rest: Any,
) -> Any:
    mask = rest[2]
    scale = rest[3]
    sparse_mode = rest[11]
    assert (
        input_layout == "BNSD"
        and head_num == query.shape[1]
        and head_num % key.shape[1] == 0
    )
    assert query.dtype == key.dtype == value.dtype and key.shape == value.shape
    assert sparse_mode == 2 and mask.shape == (2048, 2048) and mask.dtype == torch.bool
    assert torch.equal(mask.cpu(), torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    statistics = [
        query.new_zeros((*query.shape[:3], 8), dtype=torch.float32) for _ in range(2)
    ]
    return (
        _attend(query, key, value, scale).contiguous(),
        *statistics,
        query.new_zeros(0),
        0,
        0,
        0,
    )


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*inputs[:3], inputs[7], *output[:3])
    ctx.scale = inputs[8]
    ctx.others = len(inputs) - 3


def _attention_gradient(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    query, key, value, *_ = ctx.saved_tensors
    grads = _gradients(
        lambda *leaves: _attend(*leaves, ctx.scale), (query, key, value), grad
    )
    return *grads, *[None] * ctx.others


def _fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    **options: Any,
) -> tuple[Tensor, ...]:
    assert (
        head_num == query.shape[1]
        and input_layout == "BNSD"
        and options["sparse_mode"] == 2
    )
    assert options["atten_mask"].shape == (2048, 2048)
    scale = options["scale_value"]
    grads = _gradients(lambda *leaves: _attend(*leaves, scale), (query, key, value), dy)
    return *grads, query.new_empty(0), query.new_empty(0)


def _gradients(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor, ...]:
    """Gradients by plain arithmetic on the host, for tensors on any device."""
    with torch.enable_grad():
        leaves = [x.detach().cpu().requires_grad_() for x in inputs]
        grads = torch.autograd.grad(function(*leaves), leaves, grad.cpu())
    return tuple(input_grad.to(grad.device) for input_grad in grads)


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    assert gamma.dtype == x.dtype and 2 <= x.ndim <= 8 and gamma.shape == x.shape[-1:]
    rstd = (x.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.save_for_backward(*inputs[:2], output[1])


def _norm_gradient(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    return *_rms_norm_backward(grad, *ctx.saved_tensors), None


def _rms_norm_backward(
    dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """By the formula, from rstd instead of epsilon; the gradient of gamma is float32 for any dtype
    of gamma."""
    wide = x.float() * rstd
    grad = dy.float()
    scaled = grad * gamma.float()
    x_grad = rstd * (scaled - wide * (scaled * wide).mean(-1, keepdim=True))
    return x_grad.to(x.dtype), (grad * wide).flatten(0, -2).sum(0)


def _rotary_mul(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    assert r1.dtype == r2.dtype == x.dtype
    assert x.ndim == 4 and r1.shape == r2.shape == (1, 1, *x.shape[2:])  # 11SD
    batch, heads, _, width = x.shape
    assert batch < 1000 and heads < 1000 and width < 896 and width % 2 == 0
    if rotary_mode == "half":
        first, second = x.chunk(2, dim=-1)
        return r1 * x + r2 * torch.cat((-second, first), dim=-1)
    assert rotary_mode == "interleave" and batch * heads < 1000
    return r1 * x + r2 * torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def _gate(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.float().chunk(2, dim)
    return (gate * gate.sigmoid() * up).to(x.dtype)


def _gate_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _gate_backward(grad, *ctx.saved_tensors, ctx.dim), None


def _gate_backward(grad: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    return _gradients(lambda leaf: _gate(leaf, dim), (x,), grad)[0]


def _keep_gate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.dim = inputs[1]


def _grouped_matmul(
    x: list[Tensor], weight: list[Tensor], **options: Any
) -> list[Tensor]:
    (left,) = x
    (right,) = weight
    groups = options["group_list"]
    kind = options.get("group_list_type", 0)
    assert (
        left.dtype == right.dtype and left.ndim == 2 and options["split_item"] in (2, 3)
    )
    assert (
        groups.dtype == torch.int64
        and groups.ndim == 1
        and not (kind == 1 and len(groups) == 1)
    )
    ends = groups.tolist() if kind == 0 else groups.cumsum(0).tolist()
    pieces = [
        slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    # rows are split; the left factor must not be a transposed view
    if options["group_type"] == 0:
        assert (
            ends[-1] == left.shape[0]
            and left.is_contiguous()
            and right.shape[:2] == (len(ends), left.shape[1])
        )
        products = [
            (left[piece].float() @ right[i].float()) for i, piece in enumerate(pieces)
        ]
        return [torch.cat(products).to(left.dtype)]
    # The inner dim is split, of which the left factor is a transposed view
    assert options["group_type"] == 2
    assert (
        ends[-1] == left.shape[1] == right.shape[0]
        and left.t().is_contiguous()
        and right.ndim == 2
    )
    return [
        torch.stack(
            [left[:, piece].float() @ right[piece].float() for piece in pieces]
        ).to(left.dtype)
    ]


FORWARDS: dict[str, Callable[..., Any]] = {
    "npu_fusion_attention": _fusion_attention,
    "npu_rms_norm": _rms_norm,
    "npu_rotary_mul": _rotary_mul,
    "npu_swiglu": _gate,
    "npu_grouped_matmul": _grouped_matmul,
}
BACKWARDS: dict[str, Callable[..., Any]] = {
    "npu_fusion_attention_grad": _fusion_attention_grad,
    "npu_rms_norm_backward": _rms_norm_backward,
    "npu_swiglu_backward": _gate_backward,
}
"""Operators called by torch_npu's autograd."""


def _define(library: torch.library.Library) -> None:
    """Both schemas and gradients are ours."""
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
    for name, function in FORWARDS.items():
        library.impl(name, functools.partial(_count, name, function), "CPU")
    for name, gradient, keep in (
        ("npu_fusion_attention", _attention_gradient, _keep_attention),
        ("npu_rms_norm", _norm_gradient, _keep_norm),
        ("npu_swiglu", _gate_gradient, _keep_gate),
    ):
        torch.library.register_autograd(
            f"npu::{name}", gradient, setup_context=keep, lib=library
        )


def _put_into_torch_npu(library: torch.library.Library) -> None:
    """Both schemas and gradients are torch_npu's."""
    for name, function in (FORWARDS | BACKWARDS).items():
        library.impl(name, functools.partial(_count, name, function), "PrivateUse1")


@contextmanager
def npu_operators() -> Iterator[None]:
    """Have ``torch.ops.npu``."""
    with torch.library._scoped_library(
        "npu", "IMPL" if IS_REAL else "FRAGMENT"
    ) as library:
        (_put_into_torch_npu if IS_REAL else _define)(library)
        try:
            yield
        finally:
            npu_kernels.causal_mask.cache_clear()
            npu_kernels._tried.cache_clear()
