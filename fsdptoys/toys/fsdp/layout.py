"""Where every parameter of a unit lies in the flat tensors that travel between ranks.

A flat tensor is R shards of S elements, one a rank, seen as a matrix ``flat_RS``. Each parameter is cut into R chunks
along one dim, as ``torch.chunk`` and DTensor's ``Shard`` cut; its chunks stand in the same columns of all rows:

        rank 0 |  w chunk 0  |  b chunk 0  |        w: 6 rows over 4 ranks, 2 rows a chunk:
        rank 1 |  w chunk 1  |  b chunk 1  |           rows 0-1, 2-3, 4-5, nothing
        rank 2 |  w chunk 2  |  (padding)  |        b: 2 rows over 4 ranks, 1 row a chunk
        rank 3 |  (padding)  |  (padding)  |

Collectives need rows of one length, so the last chunks along dim 0 are padded. Other dims must divide evenly.

Shapes: R ranks, S elements of a shard, padding included.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """The columns of one parameter."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    dim: int
    """Along which it is cut."""
    ranks: int
    offset: int
    """First column."""

    @property
    def chunk(self) -> int:
        """Size of a chunk along ``dim``, with padding."""
        return -(-self.shape[self.dim] // self.ranks)

    @property
    def numel(self) -> int:
        """Columns, padding included."""
        return math.prod(self._chunk_shape(self.chunk))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of a rank's chunk, without padding."""
        size = self.shape[self.dim]
        first = min(rank * self.chunk, size)
        return self._chunk_shape(min(first + self.chunk, size) - first)

    def local_view(self, flat_S: Tensor, rank: int) -> Tensor:
        """A rank's chunk within its shard, without padding."""
        shape = self.local_shape(rank)
        return flat_S[self.offset : self.offset + math.prod(shape)].view(shape)

    def write(self, whole: Tensor, flat_RS: Tensor) -> None:
        """Cut a whole tensor, or gradient, into its columns; padding becomes zero."""
        if self.chunk * self.ranks != self.shape[self.dim]:
            flat_RS[self.shape[0] // self.chunk :, self.offset : self.offset + self.numel].zero_()
        for part, columns in self._pairs(whole, flat_RS):
            columns.copy_(part)

    def read(self, whole: Tensor, flat_RS: Tensor) -> None:
        """Put a whole tensor together from its columns."""
        for part, columns in self._pairs(whole, flat_RS):
            part.copy_(columns)

    def _pairs(self, whole: Tensor, flat_RS: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the whole tensor and of its columns that hold the same elements: at most two pairs."""
        columns_RN = flat_RS[:, self.offset : self.offset + self.numel]
        full, rest = self.ranks, 0
        if self.dim == 0 and self.chunk:
            full, rest = divmod(self.shape[0], self.chunk)
        if full:
            cut = whole.narrow(self.dim, 0, full * self.chunk).unflatten(self.dim, (full, self.chunk))
            yield cut.movedim(self.dim, 0), columns_RN[:full].unflatten(1, self._chunk_shape(self.chunk))
        if rest:
            shape = self._chunk_shape(rest)
            yield whole[full * self.chunk :], columns_RN[full, : math.prod(shape)].view(shape)

    def _chunk_shape(self, size: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])


def lay_out(shapes: Sequence[tuple[int, ...]], dims: Sequence[int], ranks: int) -> tuple[list[Piece], int]:
    """Place parameters one after the other.

    Args:
        shapes: of the whole parameters.
        dims: along which each is cut.
        ranks: over how many.

    Returns:
        A piece for each, and the number of elements of a shard.
    """
    pieces: list[Piece] = []
    offset = 0
    for shape, dim in zip(shapes, dims, strict=True):
        pieces.append(Piece(tuple(shape), dim, ranks, offset))
        offset += pieces[-1].numel
    return pieces, offset
