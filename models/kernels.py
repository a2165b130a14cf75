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
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import npu_kernels
from .attention import BACKENDS, attention, attention_by, masked_attention
from .grouped import choose_product, loop_alike
from .rotations import rotary

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def dense_mask(segments_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask of shape (B, 1, T, T): 0 where a token sees another of its segment, else -inf.

    Not bool, since each call of ``scaled_dot_product_attention`` would convert it and save it for
    the backward.
    """
    return dense_rows(segments_BT, 0, segments_BT.shape[1], dtype)


def dense_rows(
    segments_BT: Tensor, start: int, stop: int, dtype: torch.dtype
) -> Tensor:
    """Rows ``start`` to ``stop`` of ``dense_mask``, over the keys before ``stop``: (B, 1, stop -
    start, stop)."""
    keys_BS = segments_BT[:, :stop]
    queries_BP = segments_BT[:, start:stop]
    seen_BPS = (queries_BP.unsqueeze(2) == keys_BS.unsqueeze(1)).tril_(start)
    added_BPS = torch.full(
        seen_BPS.shape, -torch.inf, dtype=dtype, device=segments_BT.device
    )
    return added_BPS.masked_fill_(seen_BPS, 0.0).unsqueeze(1)


def block_mask(segments_BT: Tensor, dtype: torch.dtype) -> "BlockMask":
    """Mask of blocks, without those that no token sees."""

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (segments_BT[row, query] == segments_BT[row, key])

    batch, length = segments_BT.shape
    return _make_blocks(sees, batch, length, segments_BT.device)


@functools.lru_cache(maxsize=8)
def causal_blocks(length: int, device: torch.device) -> "BlockMask":
    """Mask of the blocks up to the diagonal, kept for the last few lengths."""

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return _make_blocks(sees, None, length, device)


def _make_blocks(
    sees: Callable[..., Tensor], batch: int | None, length: int, device: torch.device
) -> "BlockMask":
    """Compiled, a mask is computed block by block; eager ``create_block_mask`` would write (B, T,
    T) booleans."""
    from torch.nn.attention.flex_attention import create_block_mask

    create: Any = (
        _compiled(create_block_mask) if _compiles_flex(device) else create_block_mask
    )
    blocks: BlockMask = create(sees, batch, None, length, length, device=device)
    return blocks


def causal_flex_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    """Causal attention by ``flex_attention``."""
    return flex_attention(
        q_BHTK, k_BGTK, v_BGTK, causal_blocks(q_BHTK.shape[2], q_BHTK.device)
    )


def _compiles_flex(device: torch.device) -> bool:
    """False on a CPU: flex_attention has no gradients there and is for comparison only."""
    return device.type != "cpu"


def flex_attention(
    q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, mask: "BlockMask"
) -> Tensor:
    """Attention over blocks, compiled; eager flex_attention would materialize all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    shares = q_BHTK.shape[1] != k_BGTK.shape[1]
    attend: Any = (
        _compiled(flex_attention) if _compiles_flex(q_BHTK.device) else flex_attention
    )
    out_BHTK: Tensor = attend(
        q_BHTK, k_BGTK, v_BGTK, block_mask=mask, enable_gqa=shares
    )
    return out_BHTK


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Divide by the root of the mean square over the last dim, accumulated in float32
    (arXiv:1910.07467)."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


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
    "rms_norm": {
        "torch": rms_norm,
        "compiled": _compiled(rms_norm),
        "npu": npu_kernels.rms_norm,
    },
    "rotary": {
        "torch": rotary,
        "compiled": _compiled(rotary),
        "npu": npu_kernels.rotary,
    },
    "swiglu": {
        "torch": swiglu,
        "compiled": _compiled(swiglu),
        "npu": npu_kernels.swiglu,
    },
    "grouped_matmul": {
        "torch": choose_product,
        "looped": loop_alike,
        "npu": npu_kernels.choose_product,
    },
}
"""Operation → name of an implementation → function; those of one operation share a signature."""
