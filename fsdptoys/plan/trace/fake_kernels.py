"""An accelerator's kernels for the fake device.

The device chooses some operators: attention, normalization, grouped matmuls of experts, the loss's
kernel. They are replaced by the choice of CUDA or an NPU, with stand-ins for fused kernels
(``planned_operators``), and worker threads' jobs run inline.
Source: PyTorch's ``sdp_utils.cpp`` (choice of attention).
"""

import copy
import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterator
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
from fsdptoys.models.kernels import IMPLEMENTATIONS, DocumentAttention
from fsdptoys.optim import low_bit_adamw
from fsdptoys.parallel.capabilities import TORCH

from .fake_device import Listener, replaced
from .inline_executor import InlineExecutor
from .op_costs import fuses_rms_norm
from .planned_operators import (
    COMPILED,
    NPU_OPERATORS,
    grouped_matmul,
    npu_attention,
    rms_norm,
    update_low_bit,
)


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
    if len(normalized_shape) != 1 or (
        weight is not None and weight.dtype != input.dtype
    ):
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
    flashes = (
        torch.backends.cuda.flash_sdp_enabled()
        or torch.backends.cuda.cudnn_sdp_enabled()
    )
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
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0][
            ..., :width
        ]
    if torch.backends.cuda.mem_efficient_sdp_enabled():
        # As ``models.attention`` does on CUDA, which the fake device is not.
        if (share := query.shape[1] // key.shape[1]) > 1:
            key, value = (x.repeat_interleave(share, dim=1) for x in (key, value))
        keeps = torch.is_grad_enabled() and any(
            x.requires_grad for x in (query, key, value)
        )
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(
            query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale
        )[0]
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
        query,
        key,
        value,
        None,
        torch.is_grad_enabled(),
        0.0,
        True,
        scale=options.get("scale"),
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
            (npu_kernels.MASK_ROWS, npu_kernels.MASK_ROWS),
            dtype=torch.bool,
            device=query.device,
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
    """torch's grouped matmul. It also infers the shapes of dtypes that torch refuses."""

    def __init__(self) -> None:
        # torch 2.7 has none.
        in_bfloat16: Any = getattr(F, "grouped_mm", None) or getattr(
            torch, "_grouped_mm", None
        )

        def grouped_mm(left: Tensor, right: Tensor, *, offs: Tensor) -> Any:
            native = left.dtype == torch.bfloat16 and in_bfloat16 is not None
            return (in_bfloat16 if native else torch.ops.planned.grouped_mm)(
                left, right, offs=offs
            )

        self.grouped_mm = grouped_mm


def _grouped_linear(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    """transformers' grouped matmul; torch's infers the shapes of bfloat16 only."""
    native = getattr(F, "grouped_mm", None)
    left = left.to(right.dtype)
    if right.dtype == torch.bfloat16 and native is not None:
        multiplied: Tensor = native(left, right, offs=offs)
        return multiplied
    return grouped_matmul(left, right, offs)


@contextmanager
def replace_kernels(
    attention: AttentionKind, listener: Listener | None = None
) -> Iterator[None]:
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
    if "transformers" in sys.modules:
        moe = importlib.import_module("transformers.integrations.moe")
        replacements.append((moe, "_grouped_mm", _grouped_linear))
    if listener is not None:
        replacements.append(
            (
                cpu_offload,
                "ThreadPoolExecutor",
                lambda *args, **kwargs: InlineExecutor(listener),
            )
        )
    if attention.on_cuda:
        attend = functools.partial(
            attention_with_cudnn, attention is AttentionKind.cudnn
        )
        replacements += [
            (F, "scaled_dot_product_attention", attend),
            (block_attention, "_takes", blocks_flash_cuda),
            (chunked_loss, "softmax_gradient_", softmax_gradient_cuda),
            (chunked_loss, "choose_products", lambda hidden, weight: CUDAProducts()),
        ]
        if fuses_rms_norm():
            replacements.append(
                (F, "rms_norm", functools.partial(rms_norm_cuda, F.rms_norm))
            )
    if attention is AttentionKind.cpu:
        for dtype in (torch.float32, torch.bfloat16):
            # Fills a cache by trials, which take real tensors
            grouped.choose_product("cpu", dtype)
    # No trial, which takes real tensors.
    planned = dict.fromkeys(("torch", "looped"), lambda *args: PlannedGrouped())
    # A block mask is small, and flex_attention keeps the same tensors as FlashAttention.
    causal = functools.partial(attention_cuda, is_causal=True)
    flex = DocumentAttention(
        lambda segments, dtype: segments.new_empty(segments.shape[0], 1),
        lambda query, key, value, mask: causal(query, key, value),
    )
    entries: list[tuple[Any, dict[str, Any]]] = [
        (
            IMPLEMENTATIONS["grouped_matmul"],
            {**planned, "npu": lambda *args: npu_kernels.NPUGrouped()},
        ),
        (IMPLEMENTATIONS["attention"], {"flex": causal}),
        (IMPLEMENTATIONS["document_attention"], {"flex": flex}),
    ]
    for operation, function in COMPILED.items():
        entries.append((IMPLEMENTATIONS[operation], {"compiled": function}))
    if attention is AttentionKind.npu:
        replacements.append((F, "scaled_dot_product_attention", attention_npu))
        saved = (
            *SAVED_OPERATORS["attention"],
            torch.ops.planned.npu_fusion_attention.default,
        )
        entries.append((SAVED_OPERATORS, {"attention": saved}))
    with replaced(*replacements), ExitStack() as stack:
        for table, values in entries:
            stack.enter_context(mock.patch.dict(table, values))
        stack.callback(npu_kernels.causal_mask.cache_clear)
        yield
