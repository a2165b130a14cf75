"""The operations that have more than one implementation, and the table of them all.

Each operation is a function of tensors. ``torch`` is the plain one, PyTorch's own operators, which every other is held
against; ``compiled`` is the same function through ``torch.compile``; ``npu`` is torch_npu's fused kernel
(``npu_kernels``). A layer asks its own ``kernels`` for the function, so that two models of a process may have
different ones, and what is computed again in the backward is computed by the same.

A new implementation is entered in ``IMPLEMENTATIONS``. Which one a run takes is not decided here
(``fsdptoys.kernels``): these functions know tensors, not devices.

Not covered: LayerNorm and GELU (GPT-2), the experts' gate, which is written out with their gradients (``experts``), the
loss (``memory``), and attention over a cache (``cached_attention``), which is PyTorch's on every device.

Shapes: B batch, T sequence, S sequence with what a cache has kept before it, H query heads, G key/value heads, K width
of a head, F feed-forward width.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import npu_kernels
from .grouped import Product, choose_product, loop_alike
from .linear import goes_through_float32


class Pairs(Enum):
    """Which two elements of a head a rotary angle turns."""

    halves = "halves"
    """i and i + K/2."""
    neighbours = "neighbours"
    """2i and 2i + 1."""


def attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    """Causal attention with shared key/value heads; returns the shape of the queries."""
    dtype = q_BHTK.dtype
    shares = q_BHTK.shape[1] != k_BGTK.shape[1]
    if goes_through_float32(q_BHTK):
        q_BHTK, k_BGTK, v_BGTK = (x.float() for x in (q_BHTK, k_BGTK, v_BGTK))
    return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=shares).to(dtype)


def cached_attention(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, seen_TS: Tensor | None) -> Tensor:
    """Attention of a few tokens over all that came before; a mask says who sees whom, None that all see everything."""
    dtype = q_BHTK.dtype
    shares = q_BHTK.shape[1] != k_BGSK.shape[1]
    if goes_through_float32(q_BHTK):
        q_BHTK, k_BGSK, v_BGSK = (x.float() for x in (q_BHTK, k_BGSK, v_BGSK))
    return F.scaled_dot_product_attention(q_BHTK, k_BGSK, v_BGSK, attn_mask=seen_TS, enable_gqa=shares).to(dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Divide by the root of the mean square over the last dim, accumulated in float32 (arXiv:1910.07467)."""
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rotary(x_BHTK: Tensor, cos: Tensor, sin: Tensor, pairs: Pairs) -> Tensor:
    """Turn pairs by their angles, in float32, and return the input's dtype; cosines and sines are (T, K/2)."""
    wide = x_BHTK.float()
    if pairs is Pairs.halves:
        first, second = wide.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BHTK.dtype)
    first, second = wide.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.flatten(-2).to(x_BHTK.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` (arXiv:2002.05202)."""
    return F.silu(gate) * up


@functools.cache
def _compile(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.compile``, which imports the compiler, so not before the first call."""
    return torch.compile(function)


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def call(*args: Any) -> Tensor:
        # A block that is compiled itself takes the plain function in, and fuses it with what is around it.
        return function(*args) if torch.compiler.is_compiling() else _compile(function)(*args)

    return call


IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "attention": {"torch": attention, "npu": npu_kernels.attention},
    "rms_norm": {"torch": rms_norm, "compiled": _compiled(rms_norm), "npu": npu_kernels.rms_norm},
    "rotary": {
        "torch": rotary,
        "compiled": _compiled(rotary),
        "npu": lambda x, cos, sin, pairs: npu_kernels.rotary(x, cos, sin, pairs is Pairs.neighbours),
    },
    "swiglu": {"torch": swiglu, "compiled": _compiled(swiglu), "npu": npu_kernels.swiglu},
    "grouped_matmul": {"torch": choose_product, "looped": loop_alike, "npu": npu_kernels.choose_product},
}
"""Operation → name of an implementation → the function; those of an operation take and give the same."""


@dataclass(frozen=True)
class Kernels:
    """One implementation of each operation, as layers call it."""

    attention: Callable[[Tensor, Tensor, Tensor], Tensor] = attention
    rms_norm: Callable[[Tensor, Tensor | None, float], Tensor] = rms_norm
    rotary: Callable[[Tensor, Tensor, Tensor, Pairs], Tensor] = rotary
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu
    grouped_matmul: Callable[..., Product] = choose_product
    """``grouped_matmul(device_type, dtype, *widths)``: what multiplies the experts there."""


def choose_kernels(names: Mapping[str, str]) -> Kernels:
    """The implementations of those names; operations that are not named have PyTorch's own."""
    return Kernels(**{operation: IMPLEMENTATIONS[operation][name] for operation, name in names.items()})


class UsesKernels(nn.Module):
    """A layer that takes its operations from a ``Kernels``; PyTorch's own until ``use_kernels`` says otherwise."""

    kernels = Kernels()


def use_kernels(model: nn.Module, kernels: Kernels) -> None:
    """Have all layers of a model take these implementations from now on."""
    for module in model.modules():
        if isinstance(module, UsesKernels):
            module.kernels = kernels
