"""Frozen weights in four bits each: the normal-float quantization of QLoRA (arXiv:2305.14314).

Each block of 64 elements of a row is scaled by its largest absolute value, and every element
becomes the index of the nearest of 16 numbers, quantiles of the normal distribution. A layer
dequantizes its weight in the forward and again in the backward, and keeps neither. A weight takes
4.5 bits: 4 for the index, and a float32 for 64 elements.

Indices and scales of a row are one row of ``nf4``. This parameter has the dtype of the weight, and
its bytes mean nothing in it. So strategies copy, shard and gather it along the first dims as
any other, but must not cast it. The price next to torchao's tensor subclass: a cast would destroy
the weight silently, so strategies that cast frozen weights are refused (``config.rules.tune``). The
gain: any torch, plain tensors, and bits that do not depend on how ranks shard.

Not covered: the second quantization, of the scales, which saves 0.37 bits an element; rows that 64
does not divide.

Shapes: O and I outer and inner width, P columns of the packed row, N bytes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .decoder import DecoderModel
from .layers import Linear
from .linear import linear
from .lora import LoRALinear, is_adapter

BLOCK = 64
"""Elements of a row that share a scale."""
CODEBOOK = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
    ),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Appendix E of the paper."""
CHUNK_ELEMENTS = 2**24
"""Elements that are converted at a time, so that indices and float32 values of a large weight take
little memory."""
NAME = ".nf4"


class Codebook:
    """The numbers of all pairs of indices, on the model's device."""

    pairs: Tensor
    """float32 (256, 2): byte → its two elements, the first from the upper half."""

    def materialize(self, device: torch.device) -> None:
        """Make the numbers on a device."""
        values = torch.tensor(CODEBOOK, device=device)
        self.pairs = torch.stack(
            [values.repeat_interleave(16), values.repeat(16)], dim=1
        )


def is_packed(name: str) -> bool:
    """Whether a parameter of this name holds a quantized weight."""
    return name.endswith(NAME)


def unquantized_name(name: str) -> str:
    """The name that a quantized weight has in the model as built."""
    return f"{name.removesuffix(NAME)}.weight"


def packed_columns(columns: int, dtype: torch.dtype) -> int:
    """Elements of ``dtype`` in a packed row."""
    return (columns // 2 + columns // BLOCK * 4) // dtype.itemsize


def unpacked_elements(packed_bytes: int) -> int:
    """Elements of a weight, or of one row, from the bytes of its packed form."""
    return packed_bytes * 16 // 9


def unpacked_columns(packed_OP: Tensor) -> int:
    """I, from the length of a packed row."""
    return unpacked_elements(packed_OP.shape[-1] * packed_OP.element_size())


@torch.no_grad()
def pack(weight_OI: Tensor, packed_OP: Tensor) -> None:
    """Quantize rows of any leading dims into ``packed_OP``."""
    codebook = torch.tensor(CODEBOOK, device=weight_OI.device)
    middles = (codebook[1:] + codebook[:-1]) / 2
    rows = max(1, CHUNK_ELEMENTS // weight_OI.shape[-1])
    for source, target in zip(
        weight_OI.flatten(0, -2).split(rows),
        packed_OP.flatten(0, -2).split(rows),
        strict=True,
    ):
        blocks = source.float().unflatten(-1, (-1, BLOCK))
        scales = blocks.abs().amax(-1)
        scaled = blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
        codes = (
            torch.bucketize(scaled, middles, out_int32=True).to(torch.uint8).flatten(-2)
        )
        bytes_ON = torch.cat(
            [codes[:, ::2] << 4 | codes[:, 1::2], scales.view(torch.uint8)], dim=-1
        )
        target.copy_(bytes_ON.view(target.dtype))


def unpack(packed_OP: Tensor, pairs: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight (O, I), of any leading dims, that ``packed_OP`` stands for; rounded from
    float32."""
    columns = unpacked_columns(packed_OP)
    rows_NP = packed_OP.flatten(0, -2)
    rows = max(1, CHUNK_ELEMENTS // columns)
    if len(rows_NP) <= rows or torch.compiler.is_compiling():
        return _unpack_rows(rows_NP, pairs, columns, dtype).view(
            *packed_OP.shape[:-1], columns
        )
    whole = torch.empty(
        *packed_OP.shape[:-1], columns, dtype=dtype, device=packed_OP.device
    )
    for source, target in zip(
        rows_NP.split(rows), whole.flatten(0, -2).split(rows), strict=True
    ):
        target.copy_(_unpack_rows(source, pairs, columns, dtype))
    return whole


def _unpack_rows(
    packed_OP: Tensor, pairs: Tensor, columns: int, dtype: torch.dtype
) -> Tensor:
    bytes_ON = packed_OP.view(torch.uint8)
    scales = bytes_ON[:, columns // 2 :].contiguous().view(torch.float32)
    codes = bytes_ON[:, : columns // 2].to(torch.int32).flatten()
    blocks = pairs.index_select(0, codes).view(
        len(packed_OP), -1, BLOCK
    ) * scales.unsqueeze(-1)
    return blocks.to(dtype).flatten(1)


class _Product(torch.autograd.Function):
    """``linear`` with a quantized weight."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, packed_OP: Tensor, bias_O: Tensor | None, pairs: Tensor
    ) -> Tensor:
        ctx.save_for_backward(packed_OP, pairs)
        return linear(input, unpack(packed_OP, pairs, input.dtype), bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed_OP, pairs = ctx.saved_tensors
        grad_input = (
            linear(grad, unpack(packed_OP, pairs, grad.dtype).t())
            if ctx.needs_input_grad[0]
            else None
        )
        return grad_input, None, None, None


class NF4Linear(Linear):
    """A frozen linear layer with a packed weight; made by :func:`quantize_linears`."""

    nf4: nn.Parameter
    codebook: Codebook

    def multiply(self, input: Tensor) -> Tensor:
        """The product with the weight that ``nf4`` stands for."""
        product: Tensor = _Product.apply(
            input, self.nf4, self.bias, self.codebook.pairs
        )
        return product


class NF4LoRALinear(NF4Linear, LoRALinear):
    """The same beside an adapter."""


def quantize_linears(model: DecoderModel) -> Codebook:
    """Replace the weights of the frozen linear layers of a model's blocks, on the meta device, by
    packed ones.

    The packed rows have the dtype of the weights.

    Raises:
        ValueError: if 64 does not divide the width of a layer.
    """
    codebook = Codebook()
    for name, module in model.layers.named_modules():
        if isinstance(module, Linear) and not is_adapter(f"{name}."):
            if module.in_features % BLOCK:
                raise ValueError(
                    f"layers.{name} has rows of {module.in_features}, which {BLOCK} does not divide"
                )
            weight = module.weight
            shape = (
                module.out_features,
                packed_columns(module.in_features, weight.dtype),
            )
            del module.weight
            module.nf4 = nn.Parameter(weight.new_empty(shape), requires_grad=False)
            adapted = isinstance(module, LoRALinear)
            module.__class__ = NF4LoRALinear if adapted else NF4Linear
            module.codebook = codebook  # type: ignore[assignment]
    model.constants = (*model.constants, codebook)
    return codebook
