"""Everything that a model computes, and the layers that ask for it.

``Ops`` is one implementation: six operations chosen by name (``kernels``), and methods for the
rest, by PyTorch's own operators. A layer calls its own ``ops``, so recomputation in the backward
uses the same ones, and sends features through its own ``exchange``. Another implementation is a
subclass: ``fsdptoys.exact`` has the one with the same bits under every layout.

Shapes: N tokens, D width, E experts, K experts of a token, T sequence.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import BACKENDS, attention, masked_attention
from .exchange import ONE_RANK, Exchange, Split
from .experts import Dispatch, apply_experts
from .grouped import Product, choose_product
from .initial import Initial
from .kernels import IMPLEMENTATIONS, DocumentAttention, dense_mask, rms_norm, swiglu
from .linear import linear
from .rotations import Pairs, rotary

Score = Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
"""``score(logits_NE)``: experts_NK, weights_NK, and terms (N, E) and (N) of a router's sums."""


@dataclass(frozen=True)
class Ops:
    """One implementation of each operation."""

    attention: Callable[[Tensor, Tensor, Tensor], Tensor] = attention
    document_attention: DocumentAttention = IMPLEMENTATIONS["document_attention"][
        "torch"
    ]
    rms_norm: Callable[[Tensor, Tensor | None, float], Tensor] = rms_norm
    rotary: Callable[[Tensor, Tensor, Tensor, Pairs], Tensor] = rotary
    swiglu: Callable[[Tensor, Tensor], Tensor] = swiglu
    grouped_matmul: Callable[..., Product] = choose_product
    """``grouped_matmul(device_type, dtype, *widths)``: the experts' matmuls."""

    def linear(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``input @ weight.T + bias``; any leading shape."""
        return linear(input, weight, bias)

    def linear_columns(
        self, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """``linear`` of a layer's input, to features that ranks may split."""
        return self.linear(input, weight, bias)

    def linear_rows(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, exchange: Exchange
    ) -> Tensor:
        """``linear`` to a layer's output, summed over features that ranks may split."""
        if exchange.ranks == 1:
            return self.linear(input, weight, bias)
        output = exchange.leave(self.linear(input, weight, None))
        return output if bias is None else output + exchange.sum_gradient(bias)

    def per_channel(
        self,
        function: Callable[..., Tensor],
        hidden: Tensor,
        params: Sequence[Tensor],
        split: Split | None,
    ) -> Tensor:
        """Combine tokens with vectors, such as a scale, a bias or a gate.

        Args:
            function: elementwise ``function(hidden, *params)`` of tensors that broadcast.
            hidden: (…, D), or (B, T, H, K) of heads that share the vectors.
            params: each of the size of the last dim.
            split: how ranks split the vectors.
        """
        return function(hidden, *(param.to(hidden.dtype) for param in params))

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        """Rows of a table; ids of any shape."""
        return F.embedding(ids, table)

    def positions(self, positions: Tensor, tokens_BT: Tensor) -> Tensor:
        """Positions to embed: (T,), or (B, T)."""
        return positions

    def layer_norm(
        self, hidden: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        """Normalize the last dim to mean 0 and variance 1 (arXiv:1607.06450)."""
        return F.layer_norm(hidden, weight.shape, weight, bias, eps)

    def gelu(self, hidden: Tensor) -> Tensor:
        """The tanh form of GELU (arXiv:1606.08415)."""
        return F.gelu(hidden, approximate="tanh")

    def rope_tables(
        self, inv_freq: Tensor, positions_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary angles at integer positions, in float32, (T, K/2)."""
        angles = torch.outer(positions_T.float(), inv_freq.float())
        return angles.cos(), angles.sin()

    def temperature(
        self, factors: Callable[[Tensor], Tensor], ordinals: Tensor
    ) -> Tensor:
        """Factors of queries by position, with a last dim of 1."""
        return factors(ordinals)

    def route(
        self, hidden_ND: Tensor, weight_ED: Tensor, score: Score
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A router's experts_NK, weights_NK, and the sums of these tokens (E + 1), in float32."""
        experts_NK, weights_NK, probabilities_NE, squares_N = score(
            F.linear(hidden_ND, weight_ED)
        )
        sums = torch.cat([probabilities_NE.sum(0), squares_N.sum().unsqueeze(0)])
        return experts_NK, weights_NK, sums

    def experts(
        self,
        hidden_ND: Tensor,
        experts_NK: Tensor,
        weights_NK: Tensor,
        gate_up_EHD: Tensor,
        down_EDF: Tensor,
        dispatch: Dispatch | None,
        scale_input: bool,
    ) -> Tensor:
        """See ``moe.Experts``; with ``dispatch`` in place of ``apply_experts``."""
        if (
            not hidden_ND.dtype
            == weights_NK.dtype
            == gate_up_EHD.dtype
            == down_EDF.dtype
        ):
            raise ValueError(
                f"hidden_ND is {hidden_ND.dtype}, weights_NK {weights_NK.dtype}, the parameters of "
                f"Experts {gate_up_EHD.dtype} and {down_EDF.dtype}; cast them to one dtype"
            )
        widths = down_EDF.shape[1:]
        product = self.grouped_matmul(hidden_ND.device.type, hidden_ND.dtype, *widths)
        apply = dispatch or apply_experts
        return apply(
            hidden_ND,
            experts_NK,
            weights_NK,
            gate_up_EHD,
            down_EDF,
            product,
            scale_input=scale_input,
        )

    def split_features(self, ranks: int) -> "Ops":
        """The operations of a rank that has 1/ranks of the features."""
        return self

    @property
    def exchanged_dtype(self) -> torch.dtype | None:
        """Compute dtype of layers that get and give float64; None where they use their own."""
        return None


class Layer(nn.Module):
    """A layer that computes by ``Ops``, on features that ranks may split."""

    ops = Ops()
    exchange: Exchange = ONE_RANK
    split: Split | None = None
    """How ranks split its own parameters; None if it has none, or splits them by another axis."""
    initial: Mapping[str, Initial] = {}
    """Initial values of its own parameters by name; normal values for the rest."""

    def per_channel(
        self, function: Callable[..., Tensor], hidden: Tensor, *params: Tensor
    ) -> Tensor:
        """``Ops.per_channel`` of this layer's own parameters, split as it declares."""
        if self.split is Split.replicated:
            params = tuple(map(self.exchange.sum_gradient, params))
        return self.ops.per_channel(function, hidden, params, self.split)

    def own_flops(self, seq_len: int) -> float:
        """FLOPs of forward and backward per token, without those of its children."""
        return 0


def leave_uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compiler.disable`` without importing the compiler, which takes half as long as
    importing torch.

    torch's own optimizers use the private form, which waits for the first call (seen in torch 2.7
    and 2.13).
    """
    return getattr(torch, "_disable_dynamo", torch.compiler.disable)(function)


def choose_ops(names: Mapping[str, str]) -> Ops:
    """Implementations by operation and name; PyTorch's own for the other operations."""
    chosen = {
        operation: IMPLEMENTATIONS[operation][name] for operation, name in names.items()
    }
    backend = names.get("attention", "")
    if backend in BACKENDS and names.get("document_attention", "torch") == "torch":
        attend = functools.partial(masked_attention, backends=(BACKENDS[backend],))
        chosen["document_attention"] = DocumentAttention(dense_mask, attend)
    if backend == "flex":
        chosen["document_attention"] = IMPLEMENTATIONS["document_attention"]["flex"]
    return Ops(**chosen)


def use_ops(model: nn.Module, ops: Ops) -> None:
    """Set the operations of all layers of a model."""
    for module in model.modules():
        if isinstance(module, Layer):
            module.ops = ops


def use_exchange(model: nn.Module, exchange: Exchange) -> None:
    """Set the exchange of all layers of a model."""
    for module in model.modules():
        if isinstance(module, Layer):
            module.exchange = exchange
