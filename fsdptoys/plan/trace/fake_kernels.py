"""An accelerator's kernels for the fake device, and worker threads' jobs run inline.

The device chooses some operators: attention, normalization, grouped matmuls of experts, the loss's kernel. They are
replaced by the choice of CUDA or an NPU (``fake_fused_ops`` has the tensors that these keep). Sources: PyTorch's
``sdp_utils.cpp`` (choice of attention), torch_npu's ``npu_fusion_attention`` (github.com/Ascend/op-plugin,
``scaled_dot_product_attention``).
"""

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

from fsdptoys.device.profile import AttentionKind
from fsdptoys.loss import chunked as chunked_loss
from fsdptoys.loss.head_products import DeviceProducts
from fsdptoys.memory import cpu_offload
from fsdptoys.memory.activation_checkpointing import SAVED_OPERATORS
from fsdptoys.models import grouped, npu_kernels
from fsdptoys.models.kernels import IMPLEMENTATIONS, DocumentAttention
from fsdptoys.optim import low_bit_adamw
from fsdptoys.plan.simulator.events import HostWaitWorkers

from . import fake_fused_ops as fused
from .fake_device import Listener, replaced
from .op_costs import fuses_rms_norm

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def rms_norm_cuda(
    original: Callable[..., Tensor], input: Tensor, normalized_shape: list[int], weight: Any = None, eps: Any = None
) -> Tensor:
    """``F.rms_norm`` on CUDA from torch 2.9 on: one kernel, unless weight and input differ in dtype."""
    if len(normalized_shape) != 1 or (weight is not None and weight.dtype != input.dtype):
        return original(input, normalized_shape, weight, eps)
    return fused.rms_norm(input, weight, eps)


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
    """PyTorch's choice of ``F.scaled_dot_product_attention`` on CUDA.

    FlashAttention for 16-bit dtypes; else the memory-efficient kernel, which has no shared heads; else plain matmuls.
    """
    width = query.shape[-1]
    if query.dtype in (torch.bfloat16, torch.float16) and attn_mask is None and width <= 256:
        if width % 8:
            query, key, value = (F.pad(x, (0, -width % 8)) for x in (query, key, value))
            scale = scale or 1 / math.sqrt(width)
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0][..., :width]
    if query.shape[1] == key.shape[1]:
        keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale)[0]
    options = {"scale": scale, "enable_gqa": enable_gqa}
    plain = torch.ops.aten._scaled_dot_product_attention_math
    return plain(query, key, value, attn_mask, dropout_p, is_causal, None, **options)[0]


def attention_npu(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """torch_npu's ``F.scaled_dot_product_attention``: each causal call makes and keeps a mask."""
    mask = None
    if options.get("is_causal"):
        mask = torch.ones((npu_kernels.MASK_ROWS, npu_kernels.MASK_ROWS), dtype=torch.bool, device=query.device).triu(1)
    return fused.npu_attention(query, key, value, mask)


def softmax_gradient_cuda(logits_CV: Tensor, labels_C: Tensor, losses_C: Tensor, *_: Any, **__: Any) -> None:
    """The loss's Triton kernel (``loss.softmax_triton``), without scratch memory."""
    torch.ops.planned.softmax_gradient_(logits_CV, labels_C, losses_C)


class CUDAProducts(DeviceProducts):
    """The head's matmuls; cuBLAS adds a bf16 product to a float32 sum (``loss.head_products``)."""

    def weight_gradient(self, gradient_CV: Tensor, hidden_CD: Tensor, sum_VD: Tensor, first: bool) -> None:
        """See ``HeadProducts``."""
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
    """A ``ThreadPoolExecutor`` that runs each job in the calling thread, since dispatch modes belong to a thread."""

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
        (low_bit_adamw, "choose_update", lambda compiles: fused.low_bit_adamw),
        (npu_kernels, "operator", fused.NPU_OPERATORS.__getitem__),
        # The optimizer chooses its implementation by the type of its parameters.
        (torch_optimizer, "_foreach_supported_types", [*torch_optimizer._foreach_supported_types, FakeTensor]),
    ]
    if listener is not None:
        replacements.append((cpu_offload, "ThreadPoolExecutor", lambda *args, **kwargs: InlineExecutor(listener)))
    if attention is AttentionKind.flash:
        replacements += [
            (F, "scaled_dot_product_attention", attention_cuda),
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
        flex = DocumentAttention(
            lambda segments, dtype: segments.new_empty(segments.shape[0], 1),
            lambda query, key, value, mask: attention_cuda(query, key, value, is_causal=True),
        )
        stack.enter_context(mock.patch.dict(IMPLEMENTATIONS["document_attention"], flex=flex))
        for operation, function in fused.COMPILED.items():
            stack.enter_context(mock.patch.dict(IMPLEMENTATIONS[operation], compiled=function))
        stack.callback(npu_kernels.causal_mask.cache_clear)
        yield
