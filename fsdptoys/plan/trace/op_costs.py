"""Kind, traffic, FLOPs and scratch memory of operators: the first two from their schemas.

CUDA kernels allocate scratch memory while they run; cuBLAS keeps workspaces. Sources, under
PyTorch's ``aten/src/ATen``: ``native/transformers/cuda/flash_attn/flash_api.cpp``,
``native/cuda/Embedding.cu`` and ``EmbeddingBackwardKernel.cu``,
``native/cuda/layer_norm_kernel.cu``, ``cuda/CublasHandlePool.cpp``.

Not covered: workspaces of NPU kernels, scratch memory of sorting, memory outside the caching
allocator.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from fsdptoys.config.schema import Config
from fsdptoys.device.profile import AttentionKind, Hardware
from fsdptoys.parallel.capabilities import TORCH
from fsdptoys.plan.simulator.events import KernelKind
from fsdptoys.profiler.dispatch import (
    Argument,
    arguments_of,
    bind_arguments,
    dtype_name,
    tensors_in,
)

MIB = 2**20

ATTENTION = {
    f"{name}{suffix}": backend
    for name, backend in {
        "aten::_scaled_dot_product_flash_attention": "flash",
        "aten::_scaled_dot_product_cudnn_attention": "cudnn",
        "aten::_scaled_dot_product_efficient_attention": "efficient",
        "aten::_scaled_dot_product_flash_attention_for_cpu": "cpu",
        "planned::npu_fusion_attention": "npu",
    }.items()
    for suffix in ("", "_backward")
}
"""Operators bound by attention's speed, and their backend."""
WIDENED_NORM = "aten::linalg_vector_norm"
"""Reduces a copy in the wider dtype of its result: written, then read
(``native/ReduceOpsUtils.h``)."""
# Head width up to which a profile may list another efficiency of a backend
NARROW_HEAD = 64

PREFERS_CUDNN = (2, 11)
"""First torch whose wheels for CUDA 13 prefer cuDNN's attention
(``native/transformers/cuda/sdp_utils.cpp``)."""

HOPPER_WORKSPACE_BYTES = 32 * MIB
WORKSPACE_BYTES = 8 * MIB + 128 * 1024
HOPPERS = ("H100", "H200", "H800", "H20", "GH200")

# Number of indices above which CUDA sorts them for a lookup's gradient
EMBEDDING_SORTS_ABOVE = 3072
EMBEDDING_ROWS_PER_THREAD = 10

# Operators that may copy between host and device
COPIES = ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_")
NO_KERNEL = (
    "aten::set_",
    "aten::resize_",
    "aten::lift_fresh",
    "aten::lift",
    "aten::is_pinned",
    "prim::device",
)

LOOK_UPS = {"aten::embedding": "weight"} | {
    f"aten::{name}": "self"
    for name in (
        "index_select",
        "gather",
        "index",
        "scatter_add_",
        "scatter_",
        "index_add_",
        "index_put_",
    )
}
"""Operators that touch only some rows of this argument: as many bytes as of the others."""


TRAFFIC: dict[str, Callable[[tuple[Any, ...]], int]] = {
    # Its schema does not declare the write.
    "fsdp::all_gather_copy_in": lambda args: (
        2 * sum(map(touched_bytes, tensors_in(args[0])))
    ),
    # Reads the logits twice and writes them once (``loss.softmax_triton``).
    "planned::softmax_gradient_": lambda args: 3 * touched_bytes(args[0]),
}
"""Bytes that operators read and write, where the schema does not show it."""


Inputs = list[tuple[Argument, Tensor]]


class Operator(NamedTuple):
    """A kernel's arguments to ``simulator.costs.kernel_seconds``."""

    kind: KernelKind
    flops: float
    bytes: int
    dtype: str
    attention: str = ""


def matmul_workspace_bytes(hardware: Hardware) -> int:
    """cuBLAS's workspace for each thread and stream with matmuls."""
    if not hardware.attention.on_cuda:
        return 0
    hopper = any(device in name for device in HOPPERS for name in hardware.matches)
    return HOPPER_WORKSPACE_BYTES if hopper else WORKSPACE_BYTES


def attention_of(config: Config, hardware: Hardware) -> AttentionKind:
    """The kind of fused attention in a run's steps; cuDNN's is not deterministic, nor preferred
    before torch 2.11."""
    older = TORCH < PREFERS_CUDNN
    # Builds without CUDA plan for another machine
    older |= int((torch.version.cuda or "13").split(".")[0]) < 13
    cudnn = hardware.attention is AttentionKind.cudnn
    return (
        AttentionKind.flash
        if cudnn and (older or config.train.deterministic)
        else hardware.attention
    )


def cost_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    results: Any,
    inputs: Inputs,
    fresh: list[Tensor],
) -> Operator:
    """Cost of an operator; ``fresh`` are new tensors among its results."""
    name = func._schema.name
    flops = count_flops(func, args, kwargs, results)
    kind = KernelKind.attention if name in ATTENTION else KernelKind.matmul
    attention = ""
    if name in ATTENTION:
        width = (args[1] if name.endswith("_backward") else args[0]).shape[-1]
        attention = ATTENTION[name] + f" {NARROW_HEAD}" * (width <= NARROW_HEAD)
    # The output may be a sum in a wider dtype than the operands.
    operands = [tensor for argument, tensor in inputs if not argument.writes]
    chosen = max(
        operands or [*tensors_in(results), *(tensor for _, tensor in inputs)],
        key=Tensor.numel,
    )
    bytes = traffic(name, args, inputs, fresh)
    return Operator(
        kind if flops else KernelKind.memory,
        flops,
        bytes,
        dtype_name(chosen),
        attention,
    )


def has_no_kernel(name: str) -> bool:
    """Whether an operator runs no kernel, although it is no view."""
    return name in NO_KERNEL or name.startswith(("aten::empty", "aten::new_empty"))


def touched_bytes(tensor: Tensor) -> int:
    """Bytes that a kernel touches of a tensor; broadcast memory counts once."""
    return min(
        tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
    )


def traffic(
    name: str, args: tuple[Any, ...], inputs: Inputs, fresh: list[Tensor]
) -> int:
    """Bytes that an operator reads and writes; ``fresh`` are new tensors among its results."""
    if name in TRAFFIC:
        return TRAFFIC[name](args)
    written_bytes = sum(map(touched_bytes, fresh))
    looked_up = LOOK_UPS.get(name)
    if looked_up is not None and not fresh:
        written_bytes = max(
            (
                touched_bytes(tensor)
                for argument, tensor in inputs
                if argument.name != looked_up
            ),
            default=0,
        )
    total = written_bytes if fresh else 0
    counted = set()
    for argument, tensor in inputs:
        size = touched_bytes(tensor)
        if argument.name == looked_up:
            size = min(size, written_bytes)
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape)
        # It reads a tensor as often as it is given.
        if key not in counted or name == "aten::cat":
            counted.add(key)
            total += size * (argument.reads + argument.writes)
    if name == WIDENED_NORM and fresh:
        (_, tensor), *_ = inputs
        if (
            tensor.device.type != "cpu"
            and fresh[0].element_size() > tensor.element_size()
        ):
            total += 2 * tensor.numel() * fresh[0].element_size()
    return total


def count_flops(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> float:
    """Floating-point operations of an operator; causal attention counts half the square, with a
    mask all of it."""
    name = func._schema.name
    if name in ATTENTION:
        arguments = arguments_of(func)
        values = {
            argument.name: value
            for argument, value in bind_arguments(arguments, args, kwargs)
        }
        # The NPU's operator has a mask that it knows to be causal.
        causal = values.get(
            "is_causal", all(argument.name != "is_causal" for argument in arguments)
        )
        return _attention_flops(name, args) * (1 if causal else 2)
    if name in ("aten::_grouped_mm", "planned::grouped_mm"):
        return 2.0 * args[0].numel() * args[1].shape[-1]
    if name == "planned::addmm_to_float32_":
        return 2.0 * args[1].numel() * args[2].shape[-1]
    # The counter has no operator that writes into an argument; ``addmm_`` has the products of
    # ``addmm``.
    namespace, _, operator = name.partition("::")
    formula = flop_registry.get(
        getattr(
            getattr(torch.ops, namespace), operator.rstrip("_"), func._overloadpacket
        )
    )
    return float(formula(*args, **kwargs, out_val=result)) if formula else 0.0


def _attention_flops(name: str, args: tuple[Any, ...]) -> float:
    """Of causal attention."""
    backward = name.endswith("_backward")
    query, key, value = args[1:4] if backward else args[:3]
    batch, heads, queries, width = query.shape
    # Two matmuls in the forward; in the backward one of them again, and four more.
    products = batch * heads * queries * key.shape[2] * (width + value.shape[3])
    return products * (2.5 if backward else 1.0)


def updates_parameters(name: str, args: tuple[Any, ...]) -> int:
    """Elements of the parameters that a fused optimizer's operator updates; 0 for other
    operators."""
    if not name.startswith("aten::_fused_") or not isinstance(args[0], (list, tuple)):
        return 0
    return sum(param.numel() for param in args[0])


def scratch_bytes(
    name: str, args: tuple[Any, ...], attention: AttentionKind
) -> list[int]:
    """Temporary blocks of a kernel."""
    scratch = _SCRATCH.get(name) if attention.on_cuda else None
    return scratch(args) if scratch else []


def _flash_backward_scratch(args: tuple[Any, ...]) -> list[int]:
    query = args[1]
    key = args[2]
    batch, heads, queries, width = query.shape
    queries = -(-queries // 128) * 128
    rounded = -(-width // 32) * 32 if width <= 192 else 256
    # The query's gradient is summed in float32, next to a row sum; shared heads have separate
    # gradients.
    sizes = [batch * heads * queries * 4, batch * heads * queries * rounded * 4]
    if key.shape[1] != heads:
        sizes += [batch * heads * key.shape[2] * width * query.element_size()] * 2
    return sizes


def _embedding_backward_scratch(args: tuple[Any, ...]) -> list[int]:
    grad = args[0]
    indices = args[1]
    num_weights = args[2]
    count = indices.numel()
    width = grad.shape[-1]
    if count <= EMBEDDING_SORTS_ABOVE:
        return []
    segments = min(count, num_weights)
    partial = count // EMBEDDING_ROWS_PER_THREAD + segments
    # Sorted indices and their origins, twice each during the sort; float32 sums of segments.
    return [count * 8] * 4 + [segments * 8, partial * 8, partial * width * 4]


def _contiguous_copy(args: tuple[Any, ...]) -> list[int]:
    return [] if args[0].is_contiguous() else [args[0].numel() * args[0].element_size()]


_SCRATCH: dict[str, Callable[[tuple[Any, ...]], list[int]]] = {
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward_scratch,
    "aten::_scaled_dot_product_cudnn_attention_backward": _flash_backward_scratch,  # assumed
    "aten::embedding_dense_backward": _embedding_backward_scratch,
    "planned::rms_norm": _contiguous_copy,
    "planned::rms_norm_backward": _contiguous_copy,
}


def fuses_rms_norm() -> bool:
    """Whether this torch has CUDA's fused normalization (from 2.9 on; an older MPS operator has the
    same name)."""
    packet = getattr(torch.ops.aten, "_fused_rms_norm", None)
    return packet is not None and len(packet.default._schema.returns) == 2
