"""Products of sorted rows with one matrix a group: torch's grouped product, or one product a group.

Rows that are sorted by expert form contiguous groups of unequal length. A ``Product`` multiplies all groups:

- ``LoopedFloat32``: the same loop by way of float32, for bf16 on CPUs that cannot multiply it (``linear``).
- ``Grouped``: torch's own grouped product, one call for all groups and no host synchronisation. For accelerators.
- ``Looped``: one product a group over slices, with the group ends fetched once. Work and memory follow the rows alone,
  however uneven the groups are. For CPUs, where torch's grouped product is the same loop plus fresh buffers, and for
  accelerators without a grouped product, where fetching the ends is one host synchronisation a layer call.
- ``LoopedOneDNN``: the same loop with oneDNN's float32 product, for CPUs with AVX-512. torch sends float32 products to
  MKL, which reached half of oneDNN's speed on an AMD EPYC (``benchmarks/moe.md``). Both are full float32. Not tried on
  Intel.

oneDNN prepares code for every new number of rows. A loop may therefore lengthen its pieces to ``row_multiple``, so that
a few lengths serve all loads; what is computed beyond a group is never used. With loads that change from step to step
this took 10 to 13% off forward and backward.

Not covered: padding all groups to the longest for one ``torch.bmm``. It gained 1 to 6% in products of even groups, and
costs E-fold when all tokens choose one expert. ``Grouped`` has been tried on CPUs alone.

Shapes: M rows of a piece, I and O inner and outer width of a product, E experts, R rows of all experts.
"""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .linear import lacks_bfloat16


class Segment(NamedTuple):
    """Rows that are multiplied in one call, and whose matrices."""

    experts: int | slice
    """Index into the leading dim of the stacked matrices."""
    start: int
    """First row."""
    length: int
    """Number of rows that belong to ``experts``."""
    padded: int
    """Number of rows to multiply, at least ``length``; those beyond belong to later experts, or to nobody."""
    ends_E: Tensor | None
    """Ends of the groups within the rows, int32, where a piece has several."""


class Looped:
    """One ``torch.mm`` a group, written into its place."""

    one_pass_sums = True
    """Whether a CPU may add up a token's rows in one pass, which rounds otherwise than product by product."""

    def __init__(self, row_multiple: int = 1) -> None:
        self.row_multiple = row_multiple

    def pieces(self, ends_E: Tensor, rows: int) -> Sequence[Segment]:
        """Cut R rows into one piece an expert that has any; fetches the ends from the device.

        On the meta device, where nobody knows the ends, all rows are the first expert's.
        """
        ends = [rows] * ends_E.numel() if ends_E.is_meta else ends_E.tolist()
        if ends[-1] != rows:
            raise ValueError(
                f"experts_NK holds an expert above the last one, {len(ends) - 1}; give ids below {len(ends)}"
            )
        multiple = self.row_multiple
        return [
            Segment(expert, start, end - start, -(-(end - start) // multiple) * multiple, None)
            for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
            if end > start
        ]

    def linear(self, a_MI: Tensor, weight_OI: Tensor, piece: Segment, out_MO: Tensor | None = None) -> Tensor:
        """``a @ weight.T``, like ``torch.nn.functional.linear``, into ``out_MO`` where that is given."""
        return torch.mm(a_MI, weight_OI.t(), out=out_MO)

    def outer(self, a_MO: Tensor, b_MI: Tensor, piece: Segment, out_OI: Tensor | None) -> Tensor:
        """``a.T @ b``: the gradient of the weight of ``linear``."""
        return torch.mm(a_MO.t(), b_MI, out=out_OI)


class LoopedOneDNN(Looped):
    """One float32 product a group by oneDNN, through the operator that torch.compile uses on CPUs."""

    def linear(self, a_MI: Tensor, weight_OI: Tensor, piece: Segment, out_MO: Tensor | None = None) -> Tensor:
        """See ``Looped``."""
        product_MO = torch.ops.mkldnn._linear_pointwise(a_MI, weight_OI, None, "none", [], "")
        return product_MO if out_MO is None else out_MO.copy_(product_MO)

    def outer(self, a_MO: Tensor, b_MI: Tensor, piece: Segment, out_OI: Tensor | None) -> Tensor:
        """See ``Looped``."""
        return self.linear(a_MO.t(), b_MI.t(), piece, out_OI)


class LoopedAlike(Looped):
    """One ``torch.mm`` a group, and no way of its own on any device: what devices are compared by."""

    one_pass_sums = False


class LoopedFloat32(Looped):
    """One product a group of bf16 factors, multiplied in float32, for CPUs that cannot multiply bf16."""

    def linear(self, a_MI: Tensor, weight_OI: Tensor, piece: Segment, out_MO: Tensor | None = None) -> Tensor:
        """See ``Looped``."""
        product_MO = torch.mm(a_MI.float(), weight_OI.t().float())
        return product_MO.to(a_MI.dtype) if out_MO is None else out_MO.copy_(product_MO)

    def outer(self, a_MO: Tensor, b_MI: Tensor, piece: Segment, out_OI: Tensor | None) -> Tensor:
        """See ``Looped``."""
        return self.linear(a_MO.t(), b_MI.t(), piece, out_OI)


class Grouped:
    """torch's grouped product: all groups in one call, the results in fresh tensors."""

    row_multiple = 1
    one_pass_sums = True

    def __init__(self) -> None:
        self.grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm

    def pieces(self, ends_E: Tensor, rows: int) -> Sequence[Segment]:
        """All rows as one piece; the ends stay on the device."""
        return [Segment(slice(None), 0, rows, rows, ends_E)] if rows else []

    def linear(self, a_MI: Tensor, weight_EOI: Tensor, piece: Segment, out_MO: Tensor | None = None) -> Tensor:
        """``a @ weight.T`` of each row with its own expert's weight."""
        return self.grouped_mm(a_MI, weight_EOI.transpose(1, 2), offs=piece.ends_E)

    def outer(self, a_MO: Tensor, b_MI: Tensor, piece: Segment, out_EOI: Tensor | None) -> Tensor:
        """``a.T @ b`` within each group; zero for a group without rows."""
        return self.grouped_mm(a_MO.t(), b_MI, offs=piece.ends_E)


Product = Looped | Grouped

ONEDNN_ROW_MULTIPLE = 32
"""At 512 rows an expert this adds 3% of work, and 32 experts come in about five lengths rather than 32."""


def loop_alike(device_type: str, dtype: torch.dtype, *widths: int) -> Product:
    """A product that does the same arithmetic on every device."""
    return LoopedAlike()


def choose_product(device_type: str, dtype: torch.dtype, *widths: int) -> Product:
    """The product to use on a type of device with a dtype: the fastest that works there, and with these widths."""
    product = _fastest(device_type, dtype)
    # torch's grouped product wants rows to begin at multiples of 16 bytes.
    aligned = all(width * dtype.itemsize % 16 == 0 for width in widths)
    return product if aligned or not isinstance(product, Grouped) else Looped()


@functools.cache
def _fastest(device_type: str, dtype: torch.dtype) -> Product:
    """The first product that works, in the order of speed.

    Tried on torch 2.13 on a CPU with AVX-512. Whatever raises or gives wrong numbers here is passed over, so that a
    torch without the operators, or with other ones, falls back to ``Looped``.
    """
    if device_type == "meta":
        return Looped()
    if device_type == "cpu":
        if dtype == torch.bfloat16 and lacks_bfloat16():
            return LoopedFloat32()
        if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
            return Looped()
        if dtype in (torch.bfloat16, torch.float16):  # torch.mm is oneDNN's here
            return Looped(ONEDNN_ROW_MULTIPLE)
        onednn = LoopedOneDNN(ONEDNN_ROW_MULTIPLE)
        return onednn if dtype == torch.float32 and works(onednn, device_type, dtype) else Looped()
    try:
        grouped = Grouped()
    except AttributeError:
        return Looped()
    return grouped if works(grouped, device_type, dtype) else Looped()


@torch.no_grad()
def works(product: Product, device_type: str, dtype: torch.dtype) -> bool:
    """Does the product give, in forward and backward and with an empty group, what multiplying and adding gives?"""
    try:
        # The first call may come within a selectively checkpointed block, which would keep what is tried here and hand
        # it out for what is computed there.
        with _without_dispatch_modes():
            return _is_right(product, device_type, dtype)
    except (RuntimeError, AttributeError, TypeError, NotImplementedError, ValueError):
        return False


def _without_dispatch_modes() -> AbstractContextManager[Any]:
    """No mode that was entered sees what is called in here (a private function; tried on torch 2.13)."""
    disable = getattr(torch.utils._python_dispatch, "_disable_current_modes", nullcontext)
    modes: AbstractContextManager[Any] = disable()
    return modes


def _is_right(product: Product, device_type: str, dtype: torch.dtype) -> bool:
    width, ends = 16, (24, 24, 40)
    a_MI = torch.linspace(-1, 1, 40 * width, dtype=torch.float32).cos().view(40, width).to(device_type, dtype)
    b_MO = torch.linspace(-2, 3, 40 * width, dtype=torch.float32).sin().view(40, width).to(device_type, dtype)
    weight_EOI = torch.linspace(-3, 3, 3 * width**2, dtype=torch.float32).sin().view(3, width, width)
    weight_EOI = weight_EOI.to(device_type, dtype)
    for piece in product.pieces(torch.tensor(ends, dtype=torch.int32, device=device_type), 40):
        rows = slice(piece.start, piece.start + piece.length)
        groups = [piece.experts] if isinstance(piece.experts, int) else range(3)
        for weight in (weight_EOI, weight_EOI.transpose(1, 2)):  # as in the forward, as in the backward
            result = product.linear(a_MI[rows], weight[piece.experts], piece)
            expected = [_times(a_MI[_group(ends, expert)], weight[expert]) for expert in groups]
            if not _close(result, torch.cat(expected)):
                return False
        result = product.outer(b_MO[rows], a_MI[rows], piece, None).view(-1, width, width)
        expected = [_times(b_MO[_group(ends, expert)].t(), a_MI[_group(ends, expert)].t()) for expert in groups]
        if not _close(result, torch.stack(expected)):
            return False
    return True


def _group(ends: Sequence[int], expert: int) -> slice:
    return slice(ends[expert - 1] if expert else 0, ends[expert])


def _times(a_MI: Tensor, weight_OI: Tensor) -> Tensor:
    """``a @ weight.T`` in float32 without a matrix product, whose precision could be lowered by a global switch."""
    return (a_MI.float()[:, None] * weight_OI.float()[None]).sum(-1)


def _close(result: Tensor, expected: Tensor) -> bool:
    return result.shape == expected.shape and torch.allclose(result.float(), expected, rtol=0.02, atol=0.02)
