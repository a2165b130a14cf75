"""Stand-ins for functions of PyTorch on fake tensors."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param

from fsdptoys.plan.trace.fake_tensors import MANY, Chunks, repeating_chunks


@pytest.mark.parametrize(("shape", "dim"), [((7, 3), 0), ((1, 4), 0), ((6, 8), 1)])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_chunks_are_those_of_fsdp2(
    shape: tuple[int, ...], dim: int, count: int
) -> None:
    """Oracle: the function that they replace."""
    tensor = torch.arange(math.prod(shape)).view(shape)
    expected = _fsdp_param._chunk_with_empty(tensor, count, dim)
    chunks = Chunks(tensor, count, dim)
    for index, chunk in enumerate(expected):
        assert torch.equal(chunks[index], chunk)
        assert chunks[index].stride() == chunk.stride()


@pytest.mark.parametrize("size", [0, 3, MANY, 3 * MANY, 3 * MANY + 1])
@pytest.mark.parametrize("count", [MANY - 1, MANY, 2 * MANY])
def test_one_chunk_stands_for_all_of_its_size(size: int, count: int) -> None:
    """Oracle: the shapes and strides of ``torch.chunk``; from ``MANY`` on there are at most two
    tensors."""
    with FakeTensorMode(), torch.no_grad():
        tensor = torch.empty(5, size, 2)
        expected = torch.chunk(tensor, count, 1)
        chunks = repeating_chunks(torch.chunk)(tensor, count, 1)
    assert [(chunk.shape, chunk.stride()) for chunk in chunks] == [
        (chunk.shape, chunk.stride()) for chunk in expected
    ]
    assert count < MANY or not size or len(set(map(id, chunks))) <= 2
