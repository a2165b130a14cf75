"""torch_npu's fused kernels, as the operations of ``kernels``.

Each gives what the plain function gives, in the same number format. What torch_npu documents that a kernel does not
take goes to PyTorch's own operators. What is kept for the backward:

- ``npu_fusion_attention``: inputs, output and 16 float32 statistics for each row; one causal mask of 4 MiB serves all
  layers and lengths (``scaled_dot_product_attention`` makes and keeps one a call).
- ``npu_rms_norm``: the input and a float32 number a row.
- ``npu_rotary_mul``: nothing but the tables. By itself it would keep its input; but the gradient of a rotation is the
  rotation by the opposite angle.
- ``npu_swiglu``: gate and up side by side; the plain one keeps those two and ``silu(gate)``.
- ``npu_grouped_matmul`` has no gradient, and needs none here: the experts' is written by hand (``experts``).

Signatures were read in the wheel of torch_npu 2.13.0 (schemas in ``libtorch_npu.so``; layouts and limits in
``_op_plugin_docs.py``; shapes, and the splitting of inner dims that those documents lack, in
``op_plugin/meta/_meta_registrations.py``). They have run under torch_npu's own autograd with the arithmetic of a CPU
(``tests/npu_stand_ins.py``), never on an NPU.

Shapes: B batch, T sequence, H query heads, G key/value heads, K width of a head, E experts, M rows, I and O widths.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .grouped import Grouped, Looped, Product, Segment, works

MASK_ROWS = 2048
"""Of the mask that stands for all causal ones under ``sparse_mode=2``, however long the sequence."""

OPERATORS = {
    "attention": "npu_fusion_attention",
    "rms_norm": "npu_rms_norm",
    "rotary": "npu_rotary_mul",
    "swiglu": "npu_swiglu",
    "grouped_matmul": "npu_grouped_matmul",
}
"""Operation → the operator that it needs."""

ATTENTION_HEADS, ATTENTION_WIDTH = 256, 768
"""The most that ``npu_fusion_attention`` takes."""
ROTARY_LIMIT = 1000
"""Below which ``npu_rotary_mul`` wants batch and heads, and for neighbours their product."""
ROTARY_WIDTH_LIMIT = 896


def operator(name: str) -> Any:
    """torch_npu's operator of that name; an AttributeError where there is none."""
    return getattr(torch.ops.npu, name)


def is_there(operation: str) -> bool:
    """Whether torch_npu, with the operator that an operation needs, has been imported, as torch does by itself."""
    try:
        operator(OPERATORS[operation])
    except AttributeError:
        return False
    return True


def attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    """See ``kernels.attention``."""
    _, heads, _, width = q_BHTK.shape
    if heads > ATTENTION_HEADS or width > ATTENTION_WIDTH:
        shares = heads != k_BGTK.shape[1]
        return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=shares)
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
    """True where a token is not seen."""
    return torch.ones((MASK_ROWS, MASK_ROWS), dtype=torch.bool, device=device).triu(1)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See ``kernels.rms_norm``; the kernel wants a weight, in the number format of the input."""
    if weight is None:
        weight = x.new_ones(x.shape[-1])
    if weight.dtype != x.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    normalised: Tensor = operator("npu_rms_norm")(x, weight, eps)[0]
    return normalised


def rotary(x_BHTK: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    """See ``kernels.rotary``."""
    turned: Tensor = _Rotary.apply(x_BHTK, cos, sin, neighbours)
    return turned


class _Rotary(torch.autograd.Function):
    """A rotation, whose gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x_BHTK: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.neighbours = neighbours
        return _turn(x_BHTK, cos, sin, neighbours)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradients[0], cos, -sin, ctx.neighbours), None, None, None


def _turn(x_BHTK: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    if neighbours:
        cos, sin = (table.repeat_interleave(2, dim=-1) for table in (cos, sin))
    else:
        cos, sin = (torch.cat((table, table), dim=-1) for table in (cos, sin))
    cos, sin = cos[None, None], sin[None, None]
    wide = x_BHTK.float()  # as precise as the tables, whose format it must have
    batch, heads, _, width = x_BHTK.shape
    within = batch * heads < ROTARY_LIMIT if neighbours else max(batch, heads) < ROTARY_LIMIT
    if within and width < ROTARY_WIDTH_LIMIT:
        turned: Tensor = operator("npu_rotary_mul")(wide, cos, sin, "interleave" if neighbours else "half")
    else:
        turned = wide * cos + _quarter_turn(wide, neighbours) * sin
    return turned.to(x_BHTK.dtype)


def _quarter_turn(x: Tensor, neighbours: bool) -> Tensor:
    if neighbours:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((-second, first), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See ``kernels.swiglu``; gate and up are copied to lie side by side."""
    product: Tensor = operator("npu_swiglu")(torch.cat((gate, up), dim=-1), -1)
    return product


class NPUGrouped(Grouped):
    """torch_npu's grouped product: all groups in one call, the ends stay on the device."""

    def __init__(self) -> None:
        self.grouped_matmul = operator("npu_grouped_matmul")

    def linear(self, a_MI: Tensor, weight_EOI: Tensor, piece: Segment, out_MO: Tensor | None = None) -> Tensor:
        """See ``Grouped``."""
        return self._multiply(a_MI, weight_EOI.transpose(1, 2), piece, group_type=0)  # rows are split

    def outer(self, a_MO: Tensor, b_MI: Tensor, piece: Segment, out_EOI: Tensor | None) -> Tensor:
        """See ``Grouped``."""
        return self._multiply(a_MO.t(), b_MI, piece, group_type=2)  # the inner dim is split

    def _multiply(self, left: Tensor, right: Tensor, piece: Segment, group_type: int) -> Tensor:
        assert piece.ends_E is not None
        # Ends (type 0) rather than counts (type 1), of which it refuses a single one. split_item=3: one result.
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
    """The grouped product where it gives right numbers, else one product a group."""
    return _tried(device_type, dtype)


@functools.cache
def _tried(device_type: str, dtype: torch.dtype) -> Product:
    grouped = NPUGrouped()
    return grouped if works(grouped, device_type, dtype) else Looped()
