"""Gradient checkpointing: which blocks run twice, and that nothing else changes."""

from collections import Counter

import pytest
import torch

from fsdptoys.memory import GradientCheckpointing, MemoryConfig, apply_checkpointing, cross_entropy_sum
from fsdptoys.models import LlamaConfig

SHAPE = LlamaConfig(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=40, max_seq_len=32)
NONE, FULL = GradientCheckpointing.none, GradientCheckpointing.full


def gradients(memory: MemoryConfig) -> tuple[dict[str, torch.Tensor], Counter[int], int]:
    """Gradients by name, forwards of each block, and bytes saved for the backward."""
    torch.manual_seed(0)
    model = SHAPE.build()
    model.init_buffers(torch.device("cpu"))
    for name, param in model.named_parameters():
        model.init_rows(name, param.data, torch.Generator().manual_seed(len(name)))
    apply_checkpointing(memory, model.layers)
    forwards: Counter[int] = Counter()
    for index, block in enumerate(model.layers):
        block.attn.register_forward_hook(lambda *_, i=index: forwards.update([i]))
    tokens_BT = torch.randint(0, SHAPE.vocab_size, (2, 16), generator=torch.Generator().manual_seed(1))
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(tokens_BT, tokens_BT, cross_entropy_sum)
    loss.backward()
    return {name: param.grad for name, param in model.named_parameters()}, forwards, sum(saved.values())


@pytest.mark.parametrize("start", [0, 1, 3])
def test_blocks_from_the_start_index_run_twice_and_gradients_stay_the_same(start: int) -> None:
    """Oracle: the same model without checkpointing, bit for bit."""
    expected, forwards, saved_bytes = gradients(MemoryConfig(gradient_checkpointing=NONE))
    assert forwards == {0: 1, 1: 1, 2: 1, 3: 1}
    got, forwards, fewer_bytes = gradients(MemoryConfig(gradient_checkpointing=FULL, checkpointing_start_index=start))
    assert forwards == {index: 1 + (index >= start) for index in range(4)}
    assert fewer_bytes < saved_bytes
    for name, gradient in expected.items():
        assert torch.equal(got[name], gradient), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_sum_leaves_out_ignored_labels(dtype: torch.dtype) -> None:
    """Oracle: F.cross_entropy over the rows that count, in float32."""
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(10, 8, generator=generator).to(dtype)
    weight_VD = torch.randn(12, 8, generator=generator).to(dtype)
    labels_N = torch.arange(10)
    labels_N[[0, 4]] = -100
    loss = cross_entropy_sum(hidden_ND, weight_VD, labels_N)
    kept = labels_N >= 0
    logits = (hidden_ND[kept] @ weight_VD.T).float()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, labels_N[kept], reduction="sum"))
