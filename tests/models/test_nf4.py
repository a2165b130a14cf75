"""Quantized weights: the numbers of torchao and of the paper, and matmuls with what they stand
for."""

import pytest
import torch
from torch import Tensor

from fsdptoys.models.nf4 import (
    CODEBOOK,
    Codebook,
    pack,
    packed_columns,
    quantize_linears,
    unpack,
)
from fsdptoys.utils.torchao import torchao_fault
from tests.harness.families import SMALL

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def codebook() -> Tensor:
    book = Codebook()
    book.materialize(torch.device("cpu"))
    return book.pairs


def packed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    columns = packed_columns(weight.shape[-1], dtype)
    target = torch.empty(*weight.shape[:-1], columns, dtype=dtype)
    pack(weight, target)
    return target


def nearest(weight: Tensor) -> Tensor:
    """The quantized weight, element by element."""
    blocks = weight.double().view(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    book = torch.tensor(CODEBOOK, dtype=torch.float64)
    codes = ((blocks / scales).nan_to_num()[..., None] - book).abs().argmin(-1)
    return (book[codes] * scales).view_as(weight).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 192), (300, 512)], ids=str)
def test_packed_rows_are_the_nearest_numbers_of_the_codebook(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the nearest of the 16 numbers, found in float64; the largest weight is converted in
    several chunks."""
    monkeypatch.setattr("fsdptoys.models.nf4.CHUNK_ELEMENTS", 2**16)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight[0, ..., :64] = 0.0
    rows = packed(weight, dtype)
    assert rows.nbytes * 8 == weight.numel() * 4.5
    torch.testing.assert_close(unpack(rows, codebook(), torch.float32), nearest(weight))
    assert torch.equal(
        unpack(rows, codebook(), dtype),
        unpack(rows, codebook(), torch.float32).to(dtype),
    )


def test_bytes_survive_every_dtype() -> None:
    """Oracle: the values packed in float32: no bit pattern of 16 bits is changed by clones and
    slices."""
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    expected = unpack(packed(weight, torch.float32), codebook(), torch.float32)
    for dtype in DTYPES:
        rows = torch.cat([part.clone() for part in packed(weight, dtype).split(100)])
        assert torch.equal(unpack(rows, codebook(), torch.float32), expected), dtype


@pytest.mark.skipif(torchao_fault() is not None, reason="torchao cannot be imported")
def test_codes_and_scales_are_those_of_torchao() -> None:
    """Oracle: torchao's NF4Tensor, whose scales are quantized once more: half of a step of
    theirs."""
    nf4 = pytest.importorskip("torchao.quantization")
    if not hasattr(nf4, "NF4Tensor"):
        pytest.skip("this torchao has NF4Tensor elsewhere")
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    oracle = nf4.NF4Tensor.from_tensor(weight, 64, 256)
    rows = packed(weight, torch.float32).view(torch.uint8)
    equal = (
        (rows[:, :128].flatten() == oracle.quantized_data.flatten())
        .repeat_interleave(2)
        .view_as(weight)
    )
    # Torchao rounds the codebook to four digits, which moves the middles
    assert equal.float().mean().item() > 0.999
    scales = rows[:, 128:].contiguous().view(torch.float32).flatten()
    oracle_scales = oracle.dequantize_scalers(
        oracle.quantized_scalers, oracle.quantization_factor, 256
    )
    torch.testing.assert_close(
        scales,
        oracle_scales,
        rtol=0,
        atol=(scales - scales.mean()).abs().max().item() / 100,
    )
    values = unpack(packed(weight, torch.float32), codebook(), torch.float32)
    torch.testing.assert_close(
        values[equal], oracle.get_original_weight()[equal], rtol=0, atol=0.05
    )


def test_widths_that_no_block_divides_are_refused() -> None:
    """Oracle: the message."""
    with torch.device("meta"):
        model = SMALL["qwen3"].build()
    with pytest.raises(
        ValueError,
        match=r"layers.0.mlp.down_proj has rows of 112, which 64 does not divide",
    ):
        quantize_linears(model)
