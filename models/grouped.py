"""Matmuls of sorted rows with one matrix per group: torch's grouped matmul, or one matmul per
group.

Rows sorted by expert form contiguous groups of unequal length. A ``Product`` multiplies all groups:

- ``Grouped``: torch's grouped matmul, one call for all groups. On CUDA it is one kernel without a
  device sync for bf16 on the compute capabilities of ``FAST_CAPABILITIES``; elsewhere torch loops,
  with a device sync per call.
- ``Looped``: one matmul per group; fetching the group ends is one device sync per layer call. For
  CPUs, where torch's grouped matmul is the same loop plus fresh buffers, and for accelerators
  without a fast grouped matmul.
- ``LoopedFloat32``: the same loop through float32, for bf16 and float16 on CPUs that cannot
  multiply it (``linear``).
- ``LoopedOneDNN``: the same loop with oneDNN's float32 matmul, for CPUs with AVX-512, where torch's
  own (MKL) reached half the speed on an AMD EPYC (``benchmarks/moe.md``). Not tried on Intel.

oneDNN prepares code for every new number of rows, so a loop may pad its pieces to ``row_multiple``:
with loads that change every step this took 10 to 13% off forward and backward. Results beyond a
group are never used.

Not covered: padding all groups to the longest for one ``torch.bmm``, which gained 1 to 6% for even
groups, and costs E-fold if all tokens choose one expert. ``Grouped`` has been tried on CPUs only.

Shapes: M rows of a piece, I and O inner and outer width of a matmul, E experts, R rows of all
experts.
"""

import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .linear import ONEDNN_HAS, lacks_matmul


class Segment(NamedTuple):
    """Rows multiplied in one call, and the index of their matrices."""

    experts: int | slice
    """Index into the leading dim of the stacked matrices."""
    start: int
    """First row."""
    length: int
    """Number of rows that belong to ``experts``."""
    padded: int
    """Number of rows to multiply, at least ``length``; further rows belong to later experts, or are
    padding."""
    ends_E: Tensor | None
    """Ends of the groups within the rows, int32, if a piece has several."""


class Looped:
    """One ``torch.mm`` per group, written in place."""

    def __init__(self, row_multiple: int = 1, one_pass_sums: bool = True) -> None:
        self.row_multiple = row_multiple
        self.one_pass_sums = one_pass_sums
        """Whether a CPU may sum a token's rows in one pass, which rounds differently."""

    def pieces(self, ends_E: Tensor, rows: int) -> Sequence[Segment]:
        """Split R rows into one piece per expert with rows; syncs with the device.

        On the meta device ends are unknown, so all rows are the first expert's.
        """
        ends = [rows] * ends_E.numel() if ends_E.is_meta else ends_E.tolist()
        if ends[-1] != rows:
            raise ValueError(
                f"experts_NK holds an expert above the last one, {len(ends) - 1}; give ids below "
                f"{len(ends)}"
            )
        multiple = self.row_multiple
        return [
            Segment(
                expert,
                start,
                end - start,
                -(-(end - start) // multiple) * multiple,
                None,
            )
            for expert, (start, end) in enumerate(
                zip([0, *ends[:-1]], ends, strict=True)
            )
            if end > start
        ]

    def linear(
        self,
        a_MI: Tensor,
        weight_OI: Tensor,
        piece: Segment,
        out_RO: Tensor | None = None,
    ) -> Tensor:
        """``a @ weight.T``, like ``torch.nn.functional.linear``; into the rows of the piece in
        ``out_RO``, which is returned, if given."""
        if out_RO is None:
            return self.multiply(a_MI, weight_OI)
        self.multiply(a_MI, weight_OI, out_RO[piece.start : piece.start + piece.padded])
        return out_RO

    def outer(
        self, a_MO: Tensor, b_MI: Tensor, piece: Segment, out_EOI: Tensor | None = None
    ) -> Tensor:
        """``a.T @ b``: the gradient of the weight of ``linear``; into the matrix of the piece in
        ``out_EOI``, which is returned, if given."""
        if out_EOI is None:
            return self.multiply(a_MO.t(), b_MI.t())
        self.multiply(a_MO.t(), b_MI.t(), out_EOI[piece.experts])
        return out_EOI

    def multiply(
        self, a_MI: Tensor, weight_OI: Tensor, out_MO: Tensor | None = None
    ) -> Tensor:
        """One matmul, ``a @ weight.T``."""
        return torch.mm(a_MI, weight_OI.t(), out=out_MO)


class LoopedOneDNN(Looped):
    """One float32 matmul per group by oneDNN, through the operator that torch.compile uses on
    CPUs."""

    def multiply(
        self, a_MI: Tensor, weight_OI: Tensor, out_MO: Tensor | None = None
    ) -> Tensor:
        """See ``Looped``."""
        product_MO = torch.ops.mkldnn._linear_pointwise(
            a_MI, weight_OI, None, "none", [], ""
        )
        return product_MO if out_MO is None else out_MO.copy_(product_MO)


class LoopedFloat32(Looped):
    """One matmul per group of 16-bit operands in float32, for CPUs without instructions for their
    dtype."""

    def multiply(
        self, a_MI: Tensor, weight_OI: Tensor, out_MO: Tensor | None = None
    ) -> Tensor:
        """See ``Looped``."""
        product_MO = torch.mm(a_MI.float(), weight_OI.t().float())
        return product_MO.to(a_MI.dtype) if out_MO is None else out_MO.copy_(product_MO)


class Grouped:
    """torch's grouped matmul: all groups in one call, results in fresh tensors."""

    row_multiple = 1
    one_pass_sums = True

    def __init__(self) -> None:
        self.grouped_mm = (
            getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
        )

    def pieces(self, ends_E: Tensor, rows: int) -> Sequence[Segment]:
        """All rows as one piece. Its ends are not fetched here."""
        return [Segment(slice(None), 0, rows, rows, ends_E)] if rows else []

    def linear(
        self,
        a_MI: Tensor,
        weight_EOI: Tensor,
        piece: Segment,
        out_RO: Tensor | None = None,
    ) -> Tensor:
        """``a @ weight.T`` of each row with its own expert's weight."""
        return self.grouped_mm(a_MI, weight_EOI.transpose(1, 2), offs=piece.ends_E)

    def outer(
        self, a_MO: Tensor, b_MI: Tensor, piece: Segment, out_EOI: Tensor | None = None
    ) -> Tensor:
        """``a.T @ b`` within each group; zero for a group without rows."""
        return self.grouped_mm(a_MO.t(), b_MI, offs=piece.ends_E)


Product = Looped | Grouped

FAST_CAPABILITIES = (9, 10)
"""Major compute capabilities of CUDA devices for which torch's grouped matmul is one kernel."""

ONEDNN_ROW_MULTIPLE = 32
"""At 512 rows per expert this adds 3% of work, and 32 experts have about five lengths rather than
32."""


def loop_alike(device_type: str, dtype: torch.dtype, *widths: int) -> Product:
    """Matmuls with the same arithmetic on every device."""
    return Looped(one_pass_sums=False)


def choose_product(device_type: str, dtype: torch.dtype, *widths: int) -> Product:
    """The fastest implementation that works for a device type, dtype and widths."""
    product = _fastest(device_type, dtype)
    # torch's grouped matmul requires rows aligned to 16 bytes.
    aligned = all(width * dtype.itemsize % 16 == 0 for width in widths)
    return product if aligned or not isinstance(product, Grouped) else Looped()


@functools.cache
def _fastest(device_type: str, dtype: torch.dtype) -> Product:
    """The first implementation that works, in the order of speed.

    Tried with torch 2.13 on a CPU with AVX-512. Implementations that raise or give wrong numbers
    are skipped, so a torch without the operators falls back to ``Looped``.
    """
    if device_type == "meta":
        return Looped()
    if device_type == "cpu":
        if dtype in ONEDNN_HAS and lacks_matmul(dtype):
            return LoopedFloat32()
        if (
            not torch.backends.mkldnn.is_available()
            or torch.backends.cpu.get_cpu_capability() != "AVX512"
        ):
            return Looped()
        if dtype in ONEDNN_HAS:  # torch.mm is oneDNN's here
            return Looped(ONEDNN_ROW_MULTIPLE)
        onednn = LoopedOneDNN(ONEDNN_ROW_MULTIPLE)
        return (
            onednn
            if dtype == torch.float32 and works(onednn, device_type, dtype)
            else Looped()
        )
    if device_type == "cuda" and not has_fast_kernel(dtype):
        return Looped()
    try:
        grouped = Grouped()
    except AttributeError:
        return Looped()
    return grouped if works(grouped, device_type, dtype) else Looped()


def has_fast_kernel(dtype: torch.dtype) -> bool:
    """Whether torch's grouped matmul is one kernel on the CUDA device here (``GroupedBlas.cpp`` in
    torch 2.11)."""
    return (
        dtype == torch.bfloat16
        and torch.cuda.get_device_capability()[0] in FAST_CAPABILITIES
    )


@torch.no_grad()
def works(product: Product, device_type: str, dtype: torch.dtype) -> bool:
    """Whether an implementation gives right numbers in forward and backward, with an empty group
    among others."""
    try:
        # The first call may be within a selectively checkpointed block, which would record this
        # trial and replay its results.
        with _without_dispatch_modes():
            return _is_right(product, device_type, dtype)
    except (RuntimeError, AttributeError, TypeError, NotImplementedError, ValueError):
        return False


def _without_dispatch_modes() -> AbstractContextManager[Any]:
    """Context without any active dispatch mode (private function; tried with torch 2.13)."""
    disable = getattr(
        torch.utils._python_dispatch, "_disable_current_modes", nullcontext
    )
    modes: AbstractContextManager[Any] = disable()
    return modes


def _is_right(product: Product, device_type: str, dtype: torch.dtype) -> bool:
    ends = (24, 24, 40)
    width = 16

    def make(*shape: int) -> Tensor:
        elements = torch.linspace(-3, 3, math.prod(shape), dtype=torch.float32)
        return elements.sin().view(shape).to(device_type, dtype)

    a_MI = make(40, width)
    b_MO = make(40, width).flip(1)
    weight_EOI = make(3, width, width)
    # A matrix of zeros for the empty group.
    outer_EOI = weight_EOI.new_zeros(weight_EOI.shape)
    for piece in product.pieces(
        torch.tensor(ends, dtype=torch.int32, device=device_type), 40
    ):
        rows = slice(piece.start, piece.start + piece.length)
        # As in the forward, and as in the backward.
        for weight in (weight_EOI, weight_EOI.transpose(1, 2)):
            found_MO = product.linear(a_MI[rows], weight[piece.experts], piece)
            matrices = [weight[0]] * 24 + [weight[2]] * 16
            expected_MO = (torch.stack(matrices).float() * a_MI.float()[:, None]).sum(
                -1
            )
            if not _close(found_MO, expected_MO[rows]):
                return False
        outer_EOI[piece.experts] = product.outer(b_MO[rows], a_MI[rows], piece)
    # Without a matmul, whose precision a global switch could lower.
    outer_MOI = b_MO.float()[:, :, None] * a_MI.float()[:, None]
    groups = outer_MOI.split((24, 0, 16))
    return _close(outer_EOI, torch.stack([group.sum(0) for group in groups]))


def _close(result: Tensor, expected: Tensor) -> bool:
    return result.shape == expected.shape and torch.allclose(
        result.float(), expected, rtol=0.02, atol=0.02
    )
