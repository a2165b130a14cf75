"""Causal and masked attention by PyTorch's ``scaled_dot_product_attention``, and the choice of its
backend.

PyTorch chooses a backend by device, dtype, mask and shape. On CUDA it may prefer cuDNN's, which has
two limits: its gradients are NaN for some shapes with a mask
(github.com/pytorch/pytorch/issues/196678), and it builds a plan for every new shape. By default it
therefore computes causal attention with gradients only; masks, decoding and evaluation use the
other backends. The choice lies inside the function, so recomputation in the backward makes the same
one. Entering a choice took 20 to 27 µs of host time (2 cores of an AMD EPYC VM, shared; torch 2.13
and 2.15); the default choice in training enters none.

On CUDA only Flash and cuDNN share key/value heads; both need 16 bits, Flash takes no mask, and
cuDNN gets none. Otherwise heads are repeated for the memory-efficient kernel, since the fallback
would write all scores. So are they for a CPU's Flash before torch 2.9, which takes no shared heads.

Not covered: shared heads of PyTorch's memory-efficient kernel after torch 2.13.

Shapes: B batch, T sequence, S sequence with the cached tokens before it, H query heads, G key/value
heads, K width of a head.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .linear import goes_through_float32

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Name of an implementation → PyTorch's backend."""

WITHOUT_CUDNN = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)

SHARES_ON_CPU = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 9)
"""Whether a CPU's Flash takes shared heads (github.com/pytorch/pytorch/pull/157893)."""


def attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    """Causal attention with shared key/value heads; returns the shape of the queries."""
    trains = torch.is_grad_enabled()
    backends = WITHOUT_CUDNN if q_BHTK.device.type == "cuda" and not trains else ()
    return _attend(q_BHTK, k_BGTK, v_BGTK, None, backends, is_causal=True)


def attention_by(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """``attention`` by one backend, which raises where it cannot run."""

    def attend(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        return _attend(q_BHTK, k_BGTK, v_BGTK, None, (backend,), is_causal=True)

    return attend


def masked_attention(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    mask: Tensor | None,
    backends: Sequence[SDPBackend] = (),
) -> Tensor:
    """Attention with a mask that broadcasts to (B, H, T, S), bool or added to the scores; None for
    no mask.

    ``backends``: to choose from; empty for PyTorch's choice, on CUDA without cuDNN.
    """
    if not backends and q_BHTK.device.type == "cuda":
        backends = WITHOUT_CUDNN
    return _attend(q_BHTK, k_BGSK, v_BGSK, mask, backends, is_causal=False)


def chosen_backend(
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    mask: Tensor | None = None,
    backends: Sequence[SDPBackend] = (),
) -> str | None:
    """Name of the backend that PyTorch chooses for attention with a mask, or a causal one; None if
    it does not say.

    By a private function, tried with torch 2.13 and 2.15.

    Args:
        q_BHTK: with the requirement of gradients that it has in attention, as ``k_BGTK`` and
            ``v_BGTK``.
        k_BGTK: keys.
        v_BGTK: values.
        mask: as for ``masked_attention``; None for causal attention.
        backends: to choose from; empty for those that attention chooses from.

    Raises:
        RuntimeError: if none of ``backends`` takes the tensors.
    """
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return None
    k_BHTK, v_BHTK = _own_heads(q_BHTK, k_BGTK, v_BGTK, mask, backends)
    everything = tuple(BACKENDS.values()) if mask is None else WITHOUT_CUDNN
    with sdpa_kernel(list(backends or everything)):
        shares = q_BHTK.shape[1] != k_BHTK.shape[1]
        number: int = choose(
            q_BHTK, k_BHTK, v_BHTK, mask, 0.0, mask is None, enable_gqa=shares
        )
    return next(
        (name for name, backend in BACKENDS.items() if backend.value == number), None
    )


def _attend(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    mask: Tensor | None,
    backends: Sequence[SDPBackend],
    is_causal: bool,
) -> Tensor:
    dtype = q_BHTK.dtype
    if goes_through_float32(q_BHTK):
        q_BHTK, k_BGSK, v_BGSK = (x.float() for x in (q_BHTK, k_BGSK, v_BGSK))
        mask = mask.float() if mask is not None and mask.is_floating_point() else mask
    k_BGSK, v_BGSK = _own_heads(q_BHTK, k_BGSK, v_BGSK, mask, backends)
    shares = q_BHTK.shape[1] != k_BGSK.shape[1]
    with sdpa_kernel(list(backends)) if backends else nullcontext():
        attended = F.scaled_dot_product_attention(
            q_BHTK,
            k_BGSK,
            v_BGSK,
            attn_mask=mask,
            is_causal=is_causal,
            enable_gqa=shares,
        )
    return attended.to(dtype)


def _own_heads(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    mask: Tensor | None,
    backends: Sequence[SDPBackend],
) -> tuple[Tensor, Tensor]:
    """Keys and values, repeated for each query head where only kernels without shared heads would
    take them."""
    share = q_BHTK.shape[1] // k_BGSK.shape[1]
    device_type = q_BHTK.device.type
    if device_type == "cpu":
        repeats = not SHARES_ON_CPU
    elif device_type == "cuda":
        efficient = tuple(backends) == (SDPBackend.EFFICIENT_ATTENTION,)
        wide = q_BHTK.dtype not in (torch.bfloat16, torch.float16)
        repeats = mask is not None or wide or efficient
    else:
        repeats = mask is not None
    if share == 1 or not repeats:
        return k_BGSK, v_BGSK
    return k_BGSK.repeat_interleave(share, dim=1), v_BGSK.repeat_interleave(
        share, dim=1
    )
