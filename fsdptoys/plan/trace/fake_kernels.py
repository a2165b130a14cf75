"""An accelerator's kernels for the fake device, and worker threads' jobs run inline.

The device chooses some operators: attention, normalization, grouped matmuls of experts, the loss's
kernel. They are replaced by the choice of CUDA or an NPU, with stand-ins for fused kernels: shapes
of their results, and the tensors kept for the backward. torch_npu's kernels have its names and
signatures, so that ``models.npu_kernels`` runs unchanged; functions that ``torch.compile`` fuses
are assumed to read their inputs once and to keep these rather than intermediate results. Sources:
PyTorch's ``sdp_utils.cpp`` (choice of attention), torch_npu's ``npu_fusion_attention``
(github.com/Ascend/op-plugin, ``scaled_dot_product_attention``).
"""

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer as torch_optimizer

from fsdptoys.config.kernel_choice import COMPILED_ON_CUDA, Kernel, KernelConfig
from fsdptoys.config.schema import Config
from fsdptoys.device.profile import AttentionKind
from fsdptoys.loss import chunked as chunked_loss
from fsdptoys.loss.head_products import DeviceProducts
from fsdptoys.memory import cpu_offload
from fsdptoys.memory.activation_checkpointing import SAVED_OPERATORS
from fsdptoys.models import block_attention, grouped, npu_kernels
from fsdptoys.models.kernels import IMPLEMENTATIONS, DocumentAttention, Pairs
from fsdptoys.optim import low_bit_adamw
from fsdptoys.plan.simulator.events import HostWaitWorkers

from .fake_device import Listener, replaced
from .op_costs import fuses_rms_norm

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_library = torch.library.Library("planned", "DEF")


def _alike(*like: int) -> Callable[..., Any]:
    """Results with the shapes of the arguments at these places."""
    return lambda *tensors: tuple(tensors[i].new_empty(tensors[i].shape) for i in like)


def _rms_norm(input: Tensor, weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    output = torch.empty_like(input, memory_format=torch.contiguous_format)
    return output, input.new_empty((*input.shape[:-1], 1), dtype=torch.float32)


def _rms_norm_backward(
    grad: Tensor, input: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    grad_input = torch.empty_like(input, memory_format=torch.contiguous_format)
    return grad_input, torch.empty_like(weight) if weight is not None else grad.new_empty(0)


def _npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = [query.new_empty((*query.shape[:3], 8), dtype=torch.float32) for _ in range(2)]
    return query.new_empty(query.shape), statistics[0], statistics[1]


def _grouped_mm(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    groups = () if right.ndim == 3 else (len(offs),)
    return left.new_empty((*groups, left.shape[0], right.shape[-1]))


SHAPES: dict[str, Callable[..., Any]] = {
    "rms_norm(Tensor input, Tensor? weight, float? eps) -> (Tensor, Tensor)": _rms_norm,
    (
        "rms_norm_backward(Tensor grad, Tensor input, Tensor rstd, Tensor? weight) -> (Tensor, "
        "Tensor)"
    ): _rms_norm_backward,
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor, Tensor)": _npu_fusion_attention,
    (
        "npu_fusion_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor "
        "output, Tensor maximum, Tensor sum) -> (Tensor, Tensor, Tensor)"
    ): _alike(1, 2, 3),
    "grouped_mm(Tensor left, Tensor right, Tensor offs) -> Tensor": _grouped_mm,
    "rotary(Tensor input, Tensor cos, Tensor sin) -> Tensor": lambda input, *_: torch.empty_like(
        input
    ),
    "npu_swiglu(Tensor input) -> Tensor": lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)),
    "npu_swiglu_backward(Tensor grad, Tensor input) -> Tensor": lambda _, input: input.new_empty(
        input.shape
    ),
    "swiglu(Tensor gate, Tensor up) -> Tensor": lambda gate, _: gate.new_empty(gate.shape),
    "swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)": _alike(1, 2),
    (
        "low_bit_adamw_(Tensor(a!) param, Tensor grad, Tensor(b!) codes, Tensor(c!) scales, "
        "Tensor(d!) more_codes, Tensor(e!) more_scales, Tensor(f!) copies) -> ()"
    ): lambda *_: None,
    "softmax_gradient_(Tensor(a!) logits, Tensor labels, Tensor(b!) losses) -> ()": lambda *_: None,
    "addmm_to_float32_(Tensor(a!) sum, Tensor left, Tensor right) -> ()": lambda *_: None,
}
"""Schema of an operator → the function that makes its results."""
for _schema, _shape in SHAPES.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _shape, "Meta")


class _RMSNorm(torch.autograd.Function):
    """Fused normalization; keeps its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
        output, rstd = torch.ops.planned.rms_norm(input, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        input, weight, rstd = ctx.saved_tensors
        grad_input, grad_weight = torch.ops.planned.rms_norm_backward(grads[0], input, rstd, weight)
        return grad_input, None if weight is None else grad_weight, None


class _NPUAttention(torch.autograd.Function):
    """torch_npu's fused attention; keeps its inputs, its result, and two statistics per row, eight
    times each.

    Results and gradients are contiguous for any inputs.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        results = torch.ops.planned.npu_fusion_attention(query, key, value)
        ctx.save_for_backward(mask, query, key, value, *results)
        output: Tensor = results[0]
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value = torch.ops.planned.npu_fusion_attention_backward(
            grads[0], *ctx.saved_tensors[1:]
        )
        return query, key, value, None


class _KeepsInputs(torch.autograd.Function):
    """An operator that keeps its inputs for ``NAME_backward``, such as torch_npu's and the compiled
    SwiGLU."""

    @staticmethod
    def forward(ctx: Any, name: str, *tensors: Tensor) -> Tensor:
        ctx.name = name
        ctx.save_for_backward(*tensors)
        output: Tensor = getattr(torch.ops.planned, name)(*tensors)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        made = getattr(torch.ops.planned, f"{ctx.name}_backward")(grads[0], *ctx.saved_tensors)
        return None, *([made] if isinstance(made, Tensor) else made)


class _Rotary(torch.autograd.Function):
    """A compiled rotation; keeps the tables."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
        ctx.save_for_backward(cos, sin)
        output: Tensor = torch.ops.planned.rotary(input, cos, sin)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return torch.ops.planned.rotary(grads[0], *ctx.saved_tensors), None, None, None


def update_low_bit(
    param: Tensor, grad: Tensor, step: Tensor, mean: Any, square: Any, *_: Any
) -> None:
    """A compiled update of low-bit states; on a CPU the compiler makes float32 copies of both
    moments."""
    copies = param.new_empty((2, *param.shape))
    torch.ops.planned.low_bit_adamw_(
        param, grad, mean.codes, mean.scale, square.codes, square.scale, copies
    )


rms_norm: Callable[..., Tensor] = _RMSNorm.apply
npu_attention: Callable[..., Tensor] = _NPUAttention.apply


NPU_OPERATORS: dict[str, Callable[..., Any]] = {
    "npu_fusion_attention": lambda query, key, value, *_, atten_mask, **__: (
        npu_attention(query, key, value, atten_mask),
    ),
    "npu_rms_norm": lambda input, gamma, epsilon: (rms_norm(input, gamma, epsilon),),
    "npu_rotary_mul": lambda input, cos, sin, mode: torch.ops.planned.rotary(input, cos, sin),
    "npu_swiglu": lambda input, dim: _KeepsInputs.apply("npu_swiglu", input),
    "npu_grouped_matmul": lambda left, right, *, group_list, **_: [
        torch.ops.planned.grouped_mm(left[0], right[0], group_list)
    ],
}
"""torch_npu's operator → its stand-in."""

COMPILED: dict[str, Callable[..., Tensor]] = {
    "rms_norm": rms_norm,
    "rotary": _Rotary.apply,
    "swiglu": functools.partial(_KeepsInputs.apply, "swiglu"),
}
"""Operation → the stand-in for its compiled implementation."""


def planned_kernels(config: Config) -> KernelConfig:
    """Implementations of a prediction: blocks are traced eagerly, and compiled ones fuse rotations
    and SwiGLU."""
    kernels = copy.copy(config.kernels)
    if config.train.compile:
        for operation in COMPILED_ON_CUDA:
            setattr(kernels, operation, Kernel.compiled)
    return kernels


def rms_norm_cuda(
    original: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: list[int],
    weight: Any = None,
    eps: Any = None,
) -> Tensor:
    """``F.rms_norm`` on CUDA from torch 2.9 on: one kernel, unless weight and input differ in
    dtype."""
    if len(normalized_shape) != 1 or (weight is not None and weight.dtype != input.dtype):
        return original(input, normalized_shape, weight, eps)
    return rms_norm(input, weight, eps)


def attention_cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """PyTorch's choice of ``F.scaled_dot_product_attention`` on CUDA, among the backends of
    ``sdpa_kernel``.

    FlashAttention for 16-bit dtypes, also for cuDNN, which keeps tensors of the same sizes; else
    the memory-efficient kernel, for which shared heads are repeated; else plain matmuls.
    """
    width = query.shape[-1]
    flashes = torch.backends.cuda.flash_sdp_enabled() or torch.backends.cuda.cudnn_sdp_enabled()
    if (
        flashes
        and query.dtype in (torch.bfloat16, torch.float16)
        and attn_mask is None
        and width <= 256
    ):
        if width % 8:
            query, key, value = (F.pad(x, (0, -width % 8)) for x in (query, key, value))
            scale = scale or 1 / math.sqrt(width)
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0][..., :width]
    if torch.backends.cuda.mem_efficient_sdp_enabled():
        # As ``models.attention`` does on CUDA, which the fake device is not.
        if (share := query.shape[1] // key.shape[1]) > 1:
            key, value = (x.repeat_interleave(share, dim=1) for x in (key, value))
        keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale)[0]
    options = {"scale": scale, "enable_gqa": enable_gqa}
    plain = torch.ops.aten._scaled_dot_product_attention_math
    return plain(query, key, value, attn_mask, dropout_p, is_causal, None, **options)[0]


def attention_with_cudnn(
    prefers_cudnn: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    **options: Any,
) -> Any:
    """``attention_cuda`` where cuDNN is one of the backends; causal attention alone goes to it."""
    chosen = torch.backends.cuda.cudnn_sdp_enabled() and (
        prefers_cudnn or not torch.backends.cuda.flash_sdp_enabled()
    )
    takes = (
        query.dtype in (torch.bfloat16, torch.float16)
        and attn_mask is None
        and query.shape[-1] % 8 == 0
    )
    if not (chosen and takes and options.get("is_causal")):
        return attention_cuda(query, key, value, attn_mask, **options)
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    return cudnn(
        query, key, value, None, torch.is_grad_enabled(), 0.0, True, scale=options.get("scale")
    )[0]


def blocks_flash_cuda(query: Tensor) -> bool:
    """Whether FlashAttention takes blocks of keys on CUDA (``models.block_attention``)."""
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
    )


def attention_npu(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """torch_npu's ``F.scaled_dot_product_attention``: each causal call makes and keeps a mask."""
    mask = None
    if options.get("is_causal"):
        mask = torch.ones(
            (npu_kernels.MASK_ROWS, npu_kernels.MASK_ROWS), dtype=torch.bool, device=query.device
        ).triu(1)
    return npu_attention(query, key, value, mask)


def softmax_gradient_cuda(
    logits_CV: Tensor, labels_C: Tensor, losses_C: Tensor, *_: Any, **__: Any
) -> None:
    """The loss's Triton kernel (``loss.softmax_triton``), without scratch memory."""
    torch.ops.planned.softmax_gradient_(logits_CV, labels_C, losses_C)


class CUDAProducts(DeviceProducts):
    """The head's matmuls; cuBLAS adds a bf16 product to a float32 sum (``loss.head_products``)."""

    def weight_gradient(
        self, gradient_CV: Tensor, hidden_CD: Tensor, sum_VD: Tensor, first: bool
    ) -> None:
        """See ``DeviceProducts``."""
        if sum_VD.dtype == torch.float32 != hidden_CD.dtype and TORCH >= (2, 10):
            torch.ops.planned.addmm_to_float32_(sum_VD, gradient_CV.t(), hidden_CD)
        else:
            super().weight_gradient(gradient_CV, hidden_CD, sum_VD, first)


class PlannedGrouped(grouped.Grouped):
    """torch's grouped matmul, also for dtypes whose shapes it does not infer."""

    def __init__(self) -> None:
        # torch 2.7 has none.
        in_bfloat16: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)

        def grouped_mm(left: Tensor, right: Tensor, *, offs: Tensor) -> Any:
            native = left.dtype == torch.bfloat16 and in_bfloat16 is not None
            return (in_bfloat16 if native else torch.ops.planned.grouped_mm)(left, right, offs=offs)

        self.grouped_mm = grouped_mm


class _Done(Future[Any]):
    """A finished job; reading its result would have waited for it."""

    jobs: int
    listener: Listener

    def result(self, timeout: float | None = None) -> Any:
        self.listener.add(HostWaitWorkers(self.jobs))
        return super().result(timeout)


class InlineExecutor:
    """A ``ThreadPoolExecutor`` that runs each job in the calling thread, since dispatch modes
    belong to a thread."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run a job now."""
        done = _Done()
        with replaced((self._listener, "in_worker", True)):
            try:
                done.set_result(function(*args))
            except BaseException as error:
                done.set_exception(error)
        done.jobs, done.listener = self._listener.worker_jobs, self._listener
        return done

    def map(self, function: Callable[..., Any], parts: Iterable[Any]) -> Iterator[Any]:
        """Run jobs now; wait for each result in turn."""
        futures = [self.submit(function, part) for part in parts]
        return (future.result() for future in futures)


@contextmanager
def replace_kernels(attention: AttentionKind, listener: Listener | None = None) -> Iterator[None]:
    """Use a device's kernels, and run worker threads' jobs inline."""
    replacements: list[tuple[Any, str, Any]] = [
        (low_bit_adamw, "choose_update", lambda compiles: update_low_bit),
        (npu_kernels, "operator", NPU_OPERATORS.__getitem__),
        # The optimizer chooses its implementation by the type of its parameters.
        (
            torch_optimizer,
            "_foreach_supported_types",
            [*torch_optimizer._foreach_supported_types, FakeTensor],
        ),
    ]
    if listener is not None:
        replacements.append(
            (cpu_offload, "ThreadPoolExecutor", lambda *args, **kwargs: InlineExecutor(listener))
        )
    if attention.on_cuda:
        attend = functools.partial(attention_with_cudnn, attention is AttentionKind.cudnn)
        replacements += [
            (F, "scaled_dot_product_attention", attend),
            (block_attention, "_takes", blocks_flash_cuda),
            (chunked_loss, "softmax_gradient_", softmax_gradient_cuda),
            (chunked_loss, "choose_products", lambda hidden, weight: CUDAProducts()),
        ]
        if fuses_rms_norm():
            replacements.append((F, "rms_norm", functools.partial(rms_norm_cuda, F.rms_norm)))
    if attention is AttentionKind.cpu:
        for dtype in (torch.float32, torch.bfloat16):
            grouped.choose_product("cpu", dtype)  # fills a cache by trials, which take real tensors
    if attention is AttentionKind.npu:
        replacements.append((F, "scaled_dot_product_attention", attention_npu))
    with replaced(*replacements), ExitStack() as stack:
        if attention is AttentionKind.npu:
            kept = (*SAVED_OPERATORS["attention"], torch.ops.planned.npu_fusion_attention.default)
            stack.enter_context(mock.patch.dict(SAVED_OPERATORS, attention=kept))
        # No trial, which takes real tensors.
        planned = dict.fromkeys(("torch", "looped"), lambda *args: PlannedGrouped())
        products = {**planned, "npu": lambda *args: npu_kernels.NPUGrouped()}
        stack.enter_context(mock.patch.dict(IMPLEMENTATIONS["grouped_matmul"], products))
        # A block mask is small, and flex_attention keeps the same tensors as FlashAttention.
        causal = functools.partial(attention_cuda, is_causal=True)
        flex = DocumentAttention(
            lambda segments, dtype: segments.new_empty(segments.shape[0], 1),
            lambda query, key, value, mask: causal(query, key, value),
        )
        stack.enter_context(mock.patch.dict(IMPLEMENTATIONS["attention"], flex=causal))
        stack.enter_context(mock.patch.dict(IMPLEMENTATIONS["document_attention"], flex=flex))
        for operation, function in COMPILED.items():
            stack.enter_context(mock.patch.dict(IMPLEMENTATIONS[operation], compiled=function))
        stack.callback(npu_kernels.causal_mask.cache_clear)
        yield
