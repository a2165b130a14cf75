"""Implementations of operations that have more than one, and the table of them.

``torch`` is PyTorch's own operators, the reference for the others; ``compiled`` is the same
function through ``torch.compile``; ``npu`` is torch_npu's fused kernel (``npu_kernels``); attention
has PyTorch's backends by name (``attention``), and ``flex`` is its flex_attention. A layer uses
those of its ``Ops`` (``ops``). The choice for a run is made elsewhere
(``fsdptoys.config.kernel_choice``): these functions know tensors, not devices.

Not covered: LayerNorm and GELU (GPT-2); the experts' gate, which is part of their gradients
(``experts``); the loss (``loss``); attention over a cache (``attention.masked_attention``), which
is PyTorch's on every device.

Shapes: B batch, T sequence, S sequence with the cached tokens before it, H query heads, G key/value
heads, K width of a head, F feed-forward width.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import npu_kernels
from .attention import BACKENDS, attention, attention_by, masked_attention
from .grouped import choose_product, loop_alike

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Pairs(Enum):
    """The two elements of a head that a rotary angle turns."""

    halves = "halves"
    """i and i + K/2."""
    neighbors = "neighbors"
    """2i and 2i + 1."""


def dense_mask(segments_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask of shape (B, 1, T, T): 0 where a token sees another of its segment, else -inf.

    Not bool, since each call of ``scaled_dot_product_attention`` would convert it and save it for
    the backward.
    """
    return dense_rows(segments_BT, 0, segments_BT.shape[1], dtype)


def dense_rows(segments_BT: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Rows ``start`` to ``stop`` of ``dense_mask``, over the keys before ``stop``: (B, 1, stop -
    start, stop)."""
    keys_BS, queries_BP = segments_BT[:, :stop], segments_BT[:, start:stop]
    seen_BPS = (queries_BP.unsqueeze(2) == keys_BS.unsqueeze(1)).tril_(start)
    added_BPS = torch.full(seen_BPS.shape, -torch.inf, dtype=dtype, device=segments_BT.device)
    return added_BPS.masked_fill_(seen_BPS, 0.0).unsqueeze(1)


def block_mask(segments_BT: Tensor, dtype: torch.dtype) -> "BlockMask":
    """Mask of blocks, without those that no token sees.

    Compiled, it is computed block by block; eager ``create_block_mask`` would write (B, T, T)
    booleans.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (segments_BT[row, query] == segments_BT[row, key])

    batch, length = segments_BT.shape
    create: Any = _compiled(create_block_mask) if _compiles_flex(segments_BT) else create_block_mask
    blocks: BlockMask = create(sees, batch, None, length, length, device=segments_BT.device)
    return blocks


@functools.lru_cache(maxsize=8)
def causal_blocks(length: int, device: torch.device) -> "BlockMask":
    """Mask of the blocks up to the diagonal, kept for the last few lengths."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    create: Any = _compiled(create_block_mask) if device.type != "cpu" else create_block_mask
    blocks: BlockMask = create(sees, None, None, length, length, device=device)
    return blocks


def causal_flex_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    """Causal attention by ``flex_attention``."""
    return flex_attention(q_BHTK, k_BGTK, v_BGTK, causal_blocks(q_BHTK.shape[2], q_BHTK.device))


def _compiles_flex(tensor: Tensor) -> bool:
    """False on a CPU, where flex_attention has no gradients and is for comparison only."""
    return tensor.device.type != "cpu"


def flex_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, seen: "BlockMask") -> Tensor:
    """Attention over blocks, compiled; eager flex_attention would materialize all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    shares = q_BHTK.shape[1] != k_BGTK.shape[1]
    attend: Any = _compiled(flex_attention) if _compiles_flex(q_BHTK) else flex_attention
    out_BHTK: Tensor = attend(q_BHTK, k_BGTK, v_BGTK, block_mask=seen, enable_gqa=shares)
    return out_BHTK


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Divide by the root of the mean square over the last dim, accumulated in float32
    (arXiv:1910.07467)."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rotary(x_BHTK: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
    """Turn pairs by their angles, in float32, and return the input's dtype; cosines and sines are
    (T, K/2).

    On CUDA the result is a view of a contiguous (B, T, H, K), like an input from a projection.
    Attention kernels write their result in the strides of the queries, so that its heads are joined
    without a copy. Elsewhere it is contiguous: the strides also change the order of sums, and so
    the bits, in the gradients of norms of heads.
    """
    if x_BHTK.device.type in ("cpu", "npu"):
        return turn(x_BHTK, cos, sin, pairs)
    return turn(x_BHTK.transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1), pairs).transpose(1, 2)


def turn(x: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
    """``rotary`` with tables that broadcast to the pairs; the result is contiguous."""
    wide = x.float()
    if pairs is Pairs.halves:
        first, second = wide.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(
            x.dtype
        )
    first, second = wide.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` (arXiv:2002.05202)."""
    return F.silu(gate) * up


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile``, which imports the compiler, so not before the first call."""
    return torch.compile(function)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        # A compiled block inlines the plain function and fuses it with its surroundings.
        chosen = function if torch.compiler.is_compiling() else _compile(function)
        return chosen(*args, **options)

    return call


@dataclass(frozen=True)
class DocumentAttention:
    """Causal attention within segments of a sequence."""

    mask: Callable[[Tensor, torch.dtype], Any]
    """``mask(segments_BT, dtype)``: mask for tokens of equal segment numbers."""
    attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor]
    """``attend(q_BHTK, k_BGTK, v_BGTK, mask)``: returns the shape of the queries."""


IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "attention": {
        "torch": attention,
        **{name: attention_by(backend) for name, backend in BACKENDS.items()},
        "flex": causal_flex_attention,
        "npu": npu_kernels.attention,
    },
    "document_attention": {
        "torch": DocumentAttention(dense_mask, masked_attention),
        "flex": DocumentAttention(block_mask, flex_attention),
    },
    "rms_norm": {"torch": rms_norm, "compiled": _compiled(rms_norm), "npu": npu_kernels.rms_norm},
    "rotary": {
        "torch": rotary,
        "compiled": _compiled(rotary),
        "npu": lambda x, cos, sin, pairs: npu_kernels.rotary(x, cos, sin, pairs is Pairs.neighbors),
    },
    "swiglu": {"torch": swiglu, "compiled": _compiled(swiglu), "npu": npu_kernels.swiglu},
    "grouped_matmul": {
        "torch": choose_product,
        "looped": loop_alike,
        "npu": npu_kernels.choose_product,
    },
}
"""Operation → name of an implementation → function; those of one operation share a signature."""
