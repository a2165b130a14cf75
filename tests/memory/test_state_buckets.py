"""Buckets of optimizer states: their sizes, and the states that they keep."""

import pytest
import torch
from torch import nn

from fsdptoys.memory import optimizer_offload
from tests.memory.stacks import LAZY, PIPELINED, Stack, offload_stack


def test_parameters_without_a_gradient_are_unchanged() -> None:
    """Oracle: the plain optimizer; its state for them stays empty, and ours zero."""
    for how in (PIPELINED, LAZY):
        models = Stack(), Stack()
        plain = torch.optim.AdamW(models[0].parameters(), lr=1e-2)
        optimizers = (plain, offload_stack(models[1], how))
        for model, optimizer in zip(models, optimizers, strict=True):
            for _ in range(2):
                model.layers[1](model.layers[0](torch.ones(1, 8))).sum().backward()
                model.layers[0].bias.grad = None
                optimizer.step()
                optimizer.zero_grad()
        optimizers[1].state_dict()  # flushes
        for param in [models[1].layers[0].bias, *models[1].layers[2:].parameters()]:
            assert not any(value.any() for value in optimizers[1].state[param].values())
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_first_step_of_sgd_keeps_the_sign_of_zero() -> None:
    """Oracle: the plain optimizer, which copies the first gradient rather than adding it to
    nothing."""
    signs = []
    for offloads in (False, True):
        model = Stack(1)
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = offload_stack(model, PIPELINED, plain=plain) if offloads else plain
        for _ in range(2):
            for param in model.parameters():
                param.grad = torch.full_like(param, -0.0)
            optimizer.step()
            buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
            signs += [bool(buffer.signbit().all()) for buffer in buffers]
    assert signs == [True] * 8


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.5, 1.0])
def test_offload_fraction_moves_the_last_buckets_to_the_host(fraction: float) -> None:
    """Oracle: six equal buckets; the last ceil(6 · fraction) of them are moved."""
    optimizer = offload_stack(Stack(), PIPELINED, offload_fraction=fraction)
    moved = -(-6 * fraction // 1)
    on_host = [bucket.on_host for bucket in optimizer.buckets]
    assert on_host == [number >= 6 - moved for number in range(6)]


def test_bucket_exceeds_the_requested_size_only_for_one_large_parameter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: a layer's weight has 512 bytes of states, its bias 512 with padding counted, 64
    without."""
    for mib, expected in ((600, 6), (512, 12), (100, 12)):
        monkeypatch.setattr(optimizer_offload, "MIB", mib)
        optimizer = offload_stack(Stack(), PIPELINED, offload_bucket_mib=1)
        assert [param for bucket in optimizer.buckets for param in bucket.params] == [
            param for group in optimizer.param_groups for param in group["params"]
        ]
        assert len(optimizer.buckets) == expected


def test_state_dict_of_other_groups_is_refused() -> None:
    """Oracle: torch raises ValueError as well."""
    optimizer = offload_stack(Stack(), PIPELINED)
    other = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="other parameter groups"):
        optimizer.load_state_dict(other.state_dict())
