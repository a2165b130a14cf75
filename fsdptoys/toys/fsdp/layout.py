"""Layout of a unit's parameters in the flat tensors that ranks send.

A flat tensor has R shards of S elements, one a rank: ``flat_RS``. Each parameter is cut into R
chunks along one dim, as DTensor's ``Shard`` cuts; its chunks are in the same columns of all rows.
Collectives need equal rows, so last chunks along dim 0 are padded; other dims must divide evenly.

        rank 0 |  w chunk 0  |  b chunk 0  |        w: 6 rows over 4 ranks, 2 rows a chunk:
        rank 1 |  w chunk 1  |  b chunk 1  |           rows 0-1, 2-3, 4-5, none
        rank 2 |  w chunk 2  |  (padding)  |        b: 2 rows over 4 ranks, 1 row a chunk
        rank 3 |  (padding)  |  (padding)  |
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor


class Piece:
    """The columns of one parameter, which start at ``offset``."""

    def __init__(self, shape: Sequence[int], dim: int, ranks: int, offset: int) -> None:
        self.shape = tuple(shape)
        self.dim = dim
        self.offset = offset
        self.chunk = -(-self.shape[dim] // ranks)  # along ``dim``, with padding
        self.numel = math.prod(self._chunk_shape(self.chunk))  # columns, with padding

    def local_part(self, whole: Tensor, rank: int) -> Tensor:
        """Return a rank's chunk as a view of the whole parameter."""
        return whole.narrow(self.dim, *self._range(rank))

    def local_view(self, flat_S: Tensor, rank: int) -> Tensor:
        """Return a rank's chunk as a view of its shard, without padding."""
        shape = self._chunk_shape(self._range(rank)[1])
        return flat_S[self.offset : self.offset + math.prod(shape)].view(shape)

    def write(self, whole: Tensor, flat_RS: Tensor) -> None:
        """Copy a whole parameter or gradient into its columns; padding becomes zero."""
        if self.chunk * len(flat_RS) != self.shape[self.dim]:
            flat_RS[self.shape[0] // self.chunk :, self.offset : self.offset + self.numel].zero_()
        for part, columns in self._pairs(whole, flat_RS):
            columns.copy_(part)

    def read(self, whole: Tensor, flat_RS: Tensor) -> None:
        """Copy the columns into a whole tensor."""
        for part, columns in self._pairs(whole, flat_RS):
            part.copy_(columns)

    def _pairs(self, whole: Tensor, flat_RS: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of the whole tensor and of columns with the same elements, two at most."""
        columns_RN = flat_RS[:, self.offset : self.offset + self.numel]
        by_rows = self.dim == 0 and self.chunk
        full, rest = divmod(self.shape[0], self.chunk) if by_rows else (len(flat_RS), 0)
        if full:
            cut = whole.narrow(self.dim, 0, full * self.chunk)
            chunks = cut.unflatten(self.dim, (full, self.chunk)).movedim(self.dim, 0)
            yield chunks, columns_RN[:full].unflatten(1, self._chunk_shape(self.chunk))
        if rest:
            shape = self._chunk_shape(rest)
            yield whole[full * self.chunk :], columns_RN[full, : math.prod(shape)].view(shape)

    def _range(self, rank: int) -> tuple[int, int]:
        first = min(rank * self.chunk, self.shape[self.dim])
        return first, min(self.chunk, self.shape[self.dim] - first)

    def _chunk_shape(self, size: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])


def lay_out(shapes: Sequence[Any], dims: Sequence[int], ranks: int) -> tuple[list[Piece], int]:
    """Place parameters one after the other; return their pieces and a shard's size in elements."""
    pieces: list[Piece] = []
    offset = 0
    for shape, dim in zip(shapes, dims, strict=True):
        pieces.append(Piece(shape, dim, ranks, offset))
        offset += pieces[-1].numel
    return pieces, offset
