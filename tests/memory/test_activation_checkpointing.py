"""Gradient checkpointing: recomputed operators, saved tensors, and unchanged results, also with
activation offload."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from fsdptoys.memory.activation_checkpointing import (
    SAVED_OPERATORS,
    GradientCheckpointing,
    checkpoint_blocks,
)
from fsdptoys.memory.activation_offload import ActivationOffload
from fsdptoys.models import grouped, routers
from fsdptoys.models.layers import RunnableBlock
from tests.harness.blocks import (
    LLAMA,
    Operators,
    assert_equal,
    build,
    forward,
    gradients,
)
from tests.harness.families import SMALL

NONE, FULL, SELECTIVE = GradientCheckpointing


ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("start", "every", "twice"),
    [(0, 1, {0, 1, 2, 3}), (3, 1, {3}), (0, 2, {0, 2}), (1, 2, {1, 3}), (1, 3, {1})],
)
def test_every_kth_block_from_the_start_index_runs_twice(
    start: int, every: int, twice: set[int]
) -> None:
    """Oracle: forwards counted by hooks, and the same model without checkpointing, bitwise."""
    expected = build()
    forward(expected).backward()
    model = build()
    checkpoint_blocks(model.layers, FULL, start_index=start, every=every)
    forwards: Counter[int] = Counter()
    for index, block in enumerate(model.layers):
        block.attn.register_forward_hook(lambda *_, i=index: forwards.update([i]))
    forward(model).backward()
    assert forwards == {index: 1 + (index in twice) for index in range(LLAMA.n_layers)}
    assert_equal(gradients(model), gradients(expected))


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])
@pytest.mark.parametrize("mode", [FULL, SELECTIVE], ids=lambda mode: mode.value)
@pytest.mark.parametrize("family", SMALL)
def test_checkpointing_keeps_gradients_and_routing_of_every_family(
    family: str, mode: GradientCheckpointing, offload: bool
) -> None:
    """Oracle: the same model without checkpointing, bitwise; two micro-batches, with losses of the
    routers."""
    results = []
    for checkpointing in (NONE, mode):
        model = build(SMALL[family])
        host = ActivationOffload(torch.device("cpu"), min_bytes=0) if offload else None
        checkpoint_blocks(model.layers, checkpointing, offload=host)
        counts = []
        for seed in (1, 2):
            forward(model, seed).backward()
            counts += [router.counts_E.tolist() for router in routers(model)]
        results.append((gradients(model), counts))
    (expected, expected_counts), (result, counts) = results
    assert_equal(result, expected)
    assert counts == expected_counts


def test_first_selective_step_saves_nothing_of_the_matmul_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the same model without checkpointing, bitwise, with the trial inside a checkpointed
    block."""
    # The trial runs only there
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    results = []
    for mode in (SELECTIVE, NONE):
        grouped._fastest.cache_clear()
        model = build(SMALL["qwen3_moe"])
        checkpoint_blocks(model.layers, mode)
        forward(model).backward()
        results.append(gradients(model))
    grouped._fastest.cache_clear()
    assert_equal(*results)


def operators_of(
    family: str,
    mode: GradientCheckpointing,
    save: Sequence[str] = tuple(SAVED_OPERATORS),
) -> tuple[Counter, Counter, int]:
    """Operators of forward and of backward, and bytes saved for the backward."""
    model = build(SMALL[family])
    checkpoint_blocks(model.layers, mode, save=save)
    with Operators() as operators:
        loss = forward(model)
        in_forward = Counter(operators.calls)
        waiting = operators.alive_bytes()
        loss.backward()
    return in_forward, operators.calls - in_forward, waiting


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama2", "mm"),
        ("gpt2", "mm"),
        ("llama2", "attention"),
        ("qwen3_moe", "grouped_mm"),
        ("qwen3_moe", "mm"),
    ],
)
def test_selective_recomputes_all_operators_except_saved_ones(
    family: str, name: str
) -> None:
    """Oracle: the operators of a backward without checkpointing, and with that of full blocks."""
    if (
        name == "grouped_mm"
        and not operators_of(family, NONE)[0][
            torch.ops.mkldnn._linear_pointwise.default
        ]
    ):
        pytest.skip("this CPU multiplies experts by torch.mm")
    _, without, _ = operators_of(family, NONE)
    _, full, _ = operators_of(family, FULL)
    _, selective, _ = operators_of(family, SELECTIVE, [name])
    saved = [
        operator
        for operator in SAVED_OPERATORS[name]
        if full[operator] > without[operator]
    ]
    assert saved
    for operator in saved:
        assert selective[operator] == without[operator]
    others = {
        operator for operator in full if full[operator] > without[operator]
    } - set(saved)
    assert len(others) > 3
    for operator in others - {ATEN.detach.default}:
        assert selective[operator] > without[operator], operator


def test_selective_saves_fewer_bytes_than_none_and_more_than_full() -> None:
    """Oracle: bytes of the live tensors between forward and backward."""
    none, full = (operators_of("llama2", mode)[2] for mode in (NONE, FULL))
    both, products = (
        operators_of("llama2", SELECTIVE, save)[2]
        for save in (("mm", "attention"), ("mm",))
    )
    assert full < products < both < none
    assert operators_of("llama2", SELECTIVE, [])[2] == full


class NoisyBlock(RunnableBlock):
    """Draws random numbers in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.5)

    def compute(self, hidden_BD: Tensor) -> Tensor:  # noqa: D102
        return hidden_BD + self.dropout(
            self.linear(hidden_BD)
        ).relu() * torch.rand_like(hidden_BD)


@pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])
@pytest.mark.parametrize("mode", [FULL, SELECTIVE], ids=lambda mode: mode.value)
def test_recomputed_random_operators_draw_the_same_numbers(
    mode: GradientCheckpointing, offload: bool
) -> None:
    """Oracle: the same blocks and seed without checkpointing, bitwise, and the generator's state
    afterwards."""
    results = []
    for checkpointing in (NONE, mode):
        torch.manual_seed(0)
        blocks = [NoisyBlock() for _ in range(3)]
        host = ActivationOffload(torch.device("cpu"), min_bytes=0) if offload else None
        checkpoint_blocks(blocks, checkpointing, offload=host)
        hidden_BD = torch.randn(4, 16)
        for block in blocks:
            hidden_BD = block(hidden_BD)
        hidden_BD.square().sum().backward()
        results.append(
            ([block.linear.weight.grad for block in blocks], torch.get_rng_state())
        )
    (expected, expected_state), (result, got_state) = results
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert torch.equal(got_state, expected_state)
