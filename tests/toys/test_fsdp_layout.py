"""The flat layout of the toy FSDP: arithmetic, in one process."""

import pytest
import torch

from fsdptoys.toys.fsdp.layout import lay_out

SHAPES = [((6, 3), 0), ((2,), 0), ((1, 5), 0), ((4, 8, 3), 1), ((4, 3, 8), 2), ((7,), 0), ((0, 3), 0)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_flat_layout_matches_torch_chunk_with_zero_padding_and_is_read_back(ranks: int) -> None:
    """Oracle: ``torch.chunk``, which DTensor uses for sharding; the tensors, some of which are not contiguous."""
    pieces, numel = lay_out([shape for shape, _ in SHAPES], [dim for _, dim in SHAPES], ranks)
    flat_RS = torch.full((ranks, numel), torch.nan)
    wholes = [torch.rand(shape[::-1]).permute(*range(len(shape))[::-1]) for shape, _ in SHAPES]
    for piece, whole in zip(pieces, wholes, strict=True):
        piece.write(whole, flat_RS)
    for piece, whole, (shape, dim) in zip(pieces, wholes, SHAPES, strict=True):
        chunks = list(whole.chunk(ranks, dim))
        for rank in range(ranks):
            chunk = chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)
            columns = flat_RS[rank, piece.offset : piece.offset + piece.numel]
            assert torch.equal(piece.local_view(flat_RS[rank], rank), chunk)
            assert columns[chunk.numel() :].eq(0).all()
        read = torch.full(shape, torch.nan)
        piece.read(read, flat_RS)
        assert torch.equal(read, whole)
    assert sum(piece.numel for piece in pieces) == numel
