"""torch_npu's fused kernels for the operations of ``kernels``.

Each returns the same dtype as the plain function. Inputs outside a kernel's documented limits go to
PyTorch's own operators. Tensors saved for the backward:

- ``npu_fusion_attention``: inputs, output and 16 float32 statistics per row; one causal mask of 4
  MiB for all layers.
- ``npu_rms_norm``: the input and one float32 number per row.
- ``npu_rotary_mul``: only the tables, since the gradient of a rotation is the rotation by the
  opposite angle.
- ``npu_swiglu``: gate and up side by side.
- ``npu_grouped_matmul`` has no gradient, and needs none: the experts' is hand-written
  (``experts``).

Signatures are those of the torch_npu 2.13.0 wheel (schemas in ``libtorch_npu.so``; layouts and
limits in ``_op_plugin_docs.py``; shapes in ``op_plugin/meta/_meta_registrations.py``). They have
run under torch_npu's own autograd with CPU arithmetic (``tests/harness/npu_stand_ins.py``), never
on an NPU.

Shapes: B batch, T sequence, H query heads, G key/value heads, K width of a head, E experts, M rows,
I and O widths.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import attention as plain
from .grouped import Grouped, Looped, Product, Segment, works
from .rotations import Pairs, turn

MASK_ROWS = 2048
"""Rows of the mask that ``sparse_mode=2`` uses for any sequence length."""

OPERATORS = {
    "attention": "npu_fusion_attention",
    "rms_norm": "npu_rms_norm",
    "rotary": "npu_rotary_mul",
    "swiglu": "npu_swiglu",
    "grouped_matmul": "npu_grouped_matmul",
}
"""Operation → torch_npu operator."""

ATTENTION_HEADS = 256
ATTENTION_WIDTH = 768
"""Limits of ``npu_fusion_attention``."""
ROTARY_LIMIT = 1000
"""``npu_rotary_mul`` needs batch and heads below it, for neighbors their product."""
ROTARY_WIDTH_LIMIT = 896


def operator(name: str) -> Any:
    """torch_npu's operator of that name; raises AttributeError if missing."""
    return getattr(torch.ops.npu, name)


def is_there(operation: str) -> bool:
    """Whether torch_npu is imported, which torch does by itself, and has the operator of an
    operation."""
    try:
        operator(OPERATORS[operation])
    except AttributeError:
        return False
    return True


def attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    """See ``kernels.attention``."""
    _, heads, _, width = q_BHTK.shape
    if heads > ATTENTION_HEADS or width > ATTENTION_WIDTH:
        return plain.attention(q_BHTK, k_BGTK, v_BGTK)
    out_BHTK: Tensor = operator("npu_fusion_attention")(
        q_BHTK,
        k_BGTK,
        v_BGTK,
        heads,
        "BNSD",
        atten_mask=causal_mask(q_BHTK.device),
        scale=1 / math.sqrt(width),
        sparse_mode=2,
    )[0]
    return out_BHTK


@functools.cache
def causal_mask(device: torch.device) -> Tensor:
    """True where attention is masked out."""
    return torch.ones((MASK_ROWS, MASK_ROWS), dtype=torch.bool, device=device).triu(1)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See ``kernels.rms_norm``; the kernel needs a weight in the dtype of the input."""
    if weight is None:
        weight = x.new_ones(x.shape[-1])
    if weight.dtype != x.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    normalized: Tensor = operator("npu_rms_norm")(x, weight, eps)[0]
    return normalized


def rotary(x_BHTK: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
    """See ``rotations.rotary``."""
    turned: Tensor = _Rotary.apply(x_BHTK, cos, sin, pairs)
    return turned


class _Rotary(torch.autograd.Function):
    """A rotation; its gradient is the opposite rotation."""

    @staticmethod
    def forward(
        ctx: Any, x_BHTK: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.pairs = pairs
        return _turn(x_BHTK, cos, sin, pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradients[0], cos, -sin, ctx.pairs), None, None, None


def _turn(x_BHTK: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
    batch, heads, _, width = x_BHTK.shape
    neighbors = pairs is Pairs.neighbors
    largest = batch * heads if neighbors else max(batch, heads)
    if largest >= ROTARY_LIMIT or width >= ROTARY_WIDTH_LIMIT:
        return turn(x_BHTK, cos, sin, pairs)
    if neighbors:
        cos, sin = (table.repeat_interleave(2, dim=-1) for table in (cos, sin))
    else:
        cos, sin = (torch.cat((table, table), dim=-1) for table in (cos, sin))
    turned: Tensor = operator("npu_rotary_mul")(
        x_BHTK.float(),  # the kernel needs the dtype of the tables
        cos[None, None],
        sin[None, None],
        "interleave" if neighbors else "half",
    )
    return turned.to(x_BHTK.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See ``kernels.swiglu``; gate and up are copied side by side."""
    product: Tensor = operator("npu_swiglu")(torch.cat((gate, up), dim=-1), -1)
    return product


class NPUGrouped(Grouped):
    """torch_npu's grouped matmul: all groups in one call, without a device sync."""

    def __init__(self) -> None:
        self.grouped_matmul = operator("npu_grouped_matmul")

    def linear(
        self,
        a_MI: Tensor,
        weight_EOI: Tensor,
        piece: Segment,
        out_RO: Tensor | None = None,
    ) -> Tensor:
        """See ``Grouped``."""
        # splits rows
        return self._multiply(a_MI, weight_EOI.transpose(1, 2), piece, group_type=0)

    def outer(
        self, a_MO: Tensor, b_MI: Tensor, piece: Segment, out_EOI: Tensor | None = None
    ) -> Tensor:
        """See ``Grouped``."""
        # splits the inner dim
        return self._multiply(a_MO.t(), b_MI, piece, group_type=2)

    def _multiply(
        self, left: Tensor, right: Tensor, piece: Segment, group_type: int
    ) -> Tensor:
        assert piece.ends_E is not None
        # Ends (type 0), since it refuses a single count (type 1). split_item=3: one result.
        product: Tensor = self.grouped_matmul(
            [left],
            [right],
            group_list=piece.ends_E.to(torch.int64),
            split_item=3,
            group_type=group_type,
            group_list_type=0,
        )[0]
        return product


def choose_product(device_type: str, dtype: torch.dtype, *widths: int) -> Product:
    """The grouped matmul if it gives right numbers, else one matmul per group."""
    return _tried(device_type, dtype)


@functools.cache
def _tried(device_type: str, dtype: torch.dtype) -> Product:
    grouped = NPUGrouped()
    return grouped if works(grouped, device_type, dtype) else Looped()
