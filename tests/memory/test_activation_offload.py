"""Gradient checkpointing: recomputed operators, saved tensors, and unchanged results. Activation
offload: the moved tensors, the time of their return, and reuse of the host's buffers.

There is no stream here. Copies deferred until a wait simulate asynchronous ones.
"""

import dataclasses
import gc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdptoys.memory.activation_checkpointing import (
    SAVED_OPERATORS,
    GradientCheckpointing,
    checkpoint_blocks,
)
from fsdptoys.memory.activation_offload import ActivationOffload, Copies, StreamCopies
from fsdptoys.models import DecoderModel, grouped, routers
from fsdptoys.models.layers import RunnableBlock
from fsdptoys.train.compile import compile_blocks
from tests.harness.blocks import (
    LLAMA,
    Operators,
    RecordedStreams,
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
    (expected, expected_counts), (got, got_counts) = results
    assert_equal(got, expected)
    assert got_counts == expected_counts


def test_first_selective_step_saves_nothing_of_the_matmul_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the same model without checkpointing, bitwise, with the trial inside a checkpointed
    block."""
    monkeypatch.setattr(
        torch.backends.cpu, "get_cpu_capability", lambda: "AVX512"
    )  # the trial runs only there
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
    family: str, mode: GradientCheckpointing, save: Sequence[str] = tuple(SAVED_OPERATORS)
) -> tuple[Counter, Counter, int]:
    """Operators of forward and of backward, and bytes saved for the backward."""
    model = build(SMALL[family])
    checkpoint_blocks(model.layers, mode, save=save)
    with Operators() as seen:
        loss = forward(model)
        in_forward, waiting = Counter(seen.calls), seen.alive_bytes()
        loss.backward()
    return in_forward, seen.calls - in_forward, waiting


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
def test_selective_recomputes_all_operators_except_saved_ones(family: str, name: str) -> None:
    """Oracle: the operators of a backward without checkpointing, and with that of full blocks."""
    if (
        name == "grouped_mm"
        and not operators_of(family, NONE)[0][torch.ops.mkldnn._linear_pointwise.default]
    ):
        pytest.skip("this CPU multiplies experts by torch.mm")
    _, without, _ = operators_of(family, NONE)
    _, full, _ = operators_of(family, FULL)
    _, selective, _ = operators_of(family, SELECTIVE, [name])
    saved = [operator for operator in SAVED_OPERATORS[name] if full[operator] > without[operator]]
    assert saved
    for operator in saved:
        assert selective[operator] == without[operator]
    others = {operator for operator in full if full[operator] > without[operator]} - set(saved)
    assert len(others) > 3
    for operator in others - {ATEN.detach.default}:
        assert selective[operator] > without[operator], operator


def test_selective_saves_fewer_bytes_than_none_and_more_than_full() -> None:
    """Oracle: bytes of the live tensors between forward and backward."""
    none, full = (operators_of("llama2", mode)[2] for mode in (NONE, FULL))
    both, products = (
        operators_of("llama2", SELECTIVE, save)[2] for save in (("mm", "attention"), ("mm",))
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
        return hidden_BD + self.dropout(self.linear(hidden_BD)).relu() * torch.rand_like(hidden_BD)


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
        results.append(([block.linear.weight.grad for block in blocks], torch.get_rng_state()))
    (expected, expected_state), (got, got_state) = results
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.equal(got_state, expected_state)


BLOCKS = 6
DEEP = dataclasses.replace(LLAMA, n_layers=BLOCKS)
LAST = BLOCKS - 1


class LateCopies(Copies):
    """Copies in order and as late as waits allow; until then a tensor on its way back holds NaN."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.buffers: set[int] = set()
        self._pending: list[Callable[[], Any]] = []
        self._done = 0

    def empty_host(self, nbytes: int) -> Tensor:  # noqa: D102
        buffer = torch.full((nbytes,), 255, dtype=torch.uint8)
        self.buffers.add(buffer.data_ptr())
        return buffer

    def start(self, target: Tensor, source: Tensor) -> int:  # noqa: D102
        returns = source.data_ptr() in self.buffers
        self.events.append("back" if returns else "away")
        if returns:
            target.fill_(float("nan"))
        self._pending.append(lambda: target.data.copy_(source))
        return self._done + len(self._pending)

    def wait(self, mark: int) -> None:  # noqa: D102
        while self._done < mark:
            self._pending.pop(0)()
            self._done += 1

    def abandon(self, tensor: Tensor) -> None:  # noqa: D102
        self.events.append("abandoned")
        self.wait(self._done + len(self._pending))


def offloaded(mode: GradientCheckpointing = FULL, **which: int) -> tuple[DecoderModel, LateCopies]:
    model, copies = build(DEEP), LateCopies()
    checkpoint_blocks(
        model.layers,
        mode,
        offload=ActivationOffload(torch.device("cpu"), min_bytes=0, copies=copies),
        **which,
    )
    return model, copies


def expected(*seeds: int) -> dict[str, Tensor]:
    model = build(DEEP)
    for seed in seeds:
        forward(model, seed).backward()
    return gradients(model)


@pytest.mark.parametrize(
    "which", [{}, {"every": 2}, {"start_index": 3}, {"start_index": LAST}], ids=str
)
@pytest.mark.parametrize("mode", [FULL, SELECTIVE], ids=lambda mode: mode.value)
def test_latest_possible_copies_keep_gradients_bitwise(
    mode: GradientCheckpointing, which: dict[str, int]
) -> None:
    """Oracle: the same model without checkpointing, over accumulated micro-batches, one of them
    without a backward."""
    model, _ = offloaded(mode, **which)
    for seed in (1, 2, 3):
        forward(model, 9)
        forward(model, seed).backward()
    assert_equal(gradients(model), expected(1, 2, 3))


def test_interleaved_forwards_and_backwards_keep_gradients_bitwise() -> None:
    """Oracle: the same model without checkpointing; and a retained graph serves twice."""
    for mode in (FULL, SELECTIVE):
        for first in (0, 1):
            model, _ = offloaded(mode)
            losses = [forward(model, 1), forward(model, 1)]
            losses[first].backward(retain_graph=True)
            losses[first].backward()
            losses[1 - first].backward()
            assert_equal(gradients(model), expected(1, 1, 1))


def test_inputs_of_all_blocks_but_the_last_two_are_freed_in_the_forward() -> None:
    """Oracle: weak references to the inputs of each block."""
    model, _ = offloaded()
    inputs: list[StorageWeakRef] = []
    for block in model.layers:
        block.register_forward_pre_hook(
            lambda _, args: inputs.append(StorageWeakRef(args[0].untyped_storage()))
        )
    loss = forward(model)
    alive = [index for index, storage in enumerate(inputs) if not storage.expired()]
    loss.backward()
    assert alive == [LAST - 1, LAST]


@pytest.mark.parametrize(
    ("mode", "a_block"), [(FULL, 1), (SELECTIVE, 10)], ids=["full", "selective"]
)
def test_each_block_is_loaded_before_the_backward_of_the_next_one_ends(
    mode: GradientCheckpointing, a_block: int
) -> None:
    """Oracle: hooks on the blocks among the copies; a block has an input, seven matmuls, an
    attention's two.

    Neither the rotations shared by all blocks nor the last block's saved tensors move; the block
    before it is still on the device.
    """
    model, copies = offloaded(mode)
    for index, block in enumerate(model.layers):
        block.register_full_backward_pre_hook(lambda *_, i=index: copies.events.append(f"asks {i}"))
        block.register_full_backward_hook(lambda *_, i=index: copies.events.append(f"done {i}"))
    forward(model).backward()
    in_backward = copies.events[copies.events.index(f"asks {LAST}") :]
    # No backward needs the result of a block's last matmul.
    in_backward = [event for event in in_backward if event != "abandoned"]
    want: list[str] = []
    for index in reversed(range(BLOCKS)):
        ahead = a_block if 0 < index < LAST else 0
        want += [f"asks {index}", *["back"] * ahead, f"done {index}"]
    assert in_backward == want


@pytest.mark.parametrize("mode", [FULL, SELECTIVE], ids=lambda mode: mode.value)
def test_host_buffers_are_allocated_once_and_reused(mode: GradientCheckpointing) -> None:
    """Oracle: allocations counted, with a shorter batch and an evaluation in between."""
    model, copies = offloaded(mode)
    forward(model).backward()
    made, copied = len(copies.buffers), copies.events.count("away")
    assert made == copied > 0
    for seed in (2, 3):
        forward(model, seed).backward()
        with torch.no_grad():
            forward(model)
    assert len(copies.buffers) == made
    assert copies.events.count("away") == 3 * copied
    # Calls of blocks are linked from the last to the first of one forward, and no further.
    gc.collect()
    assert sum(type(thing).__name__ == "_Block" for thing in gc.get_objects()) <= BLOCKS


class Squashed(RunnableBlock):
    """Writes to the result of a matmul, which selective checkpointing keeps, or to its own
    input."""

    def __init__(self, writes_to_input: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.writes_to_input = writes_to_input

    def compute(self, hidden_BD: Tensor) -> Tensor:  # noqa: D102
        result_BD = self.linear(hidden_BD)
        if self.writes_to_input:
            hidden_BD.add_(1.0)
            return result_BD.exp()
        return result_BD.add_(1.0).exp()


@pytest.mark.parametrize("writes_to_input", [False, True], ids=["result", "input"])
def test_writing_in_place_to_saved_tensors_is_refused(writes_to_input: bool) -> None:
    """Oracle: autograd, which refuses it without offload too."""
    blocks = [Squashed(writes_to_input) for _ in range(4)]
    host = ActivationOffload(torch.device("cpu"), min_bytes=0)
    checkpoint_blocks(blocks, SELECTIVE, offload=host)
    hidden_BD = torch.randn(4, 8, requires_grad=True) * 1.0
    with pytest.raises(RuntimeError, match="written to in place"):
        for block in blocks:
            hidden_BD = block(hidden_BD)
        hidden_BD.sum().backward()


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_step_after_a_failure_is_correct_and_reuses_buffers(fails_in: str) -> None:
    """Oracle: the same model without checkpointing, bitwise."""
    model, copies = offloaded(SELECTIVE)
    forward(model).backward()
    made = len(copies.buffers)
    model.zero_grad()

    def fail(*_: Any) -> None:
        raise KeyError("in the middle")

    block = model.layers[2]
    handle = (
        block.register_forward_hook(fail)
        if fails_in == "forward"
        else block.register_full_backward_hook(fail)
    )
    with pytest.raises(KeyError, match="in the middle"):
        forward(model).backward()
    handle.remove()
    model.zero_grad()
    gc.collect()
    forward(model).backward()
    assert_equal(gradients(model), expected(1))
    assert len(copies.buffers) == made
    if fails_in == "backward":
        assert "abandoned" in copies.events


class Masked(RunnableBlock):
    """Takes a tensor that needs no gradient and is the same for all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)

    def compute(self, hidden_BD: Tensor, mask_BD: Tensor) -> Tensor:  # noqa: D102
        return self.linear(hidden_BD).exp() * mask_BD


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_parameters_and_inputs_without_gradient_stay_on_the_device(is_compiled: bool) -> None:
    """Oracle: one copy a block, of the output of the previous block."""
    blocks, copies = [Masked() for _ in range(4)], LateCopies()
    checkpoint_blocks(
        blocks, FULL, offload=ActivationOffload(torch.device("cpu"), min_bytes=0, copies=copies)
    )
    if is_compiled:
        compile_blocks(blocks, backend="aot_eager")
    hidden_BD, mask_BD = torch.randn(4, 8, requires_grad=True) * 1.0, torch.ones(4, 8)
    for block in blocks:
        hidden_BD = block(hidden_BD, mask_BD)
    hidden_BD.sum().backward()
    assert copies.events == ["away"] * 3 + ["back"] * 2


def test_small_tensors_stay_on_the_device() -> None:
    """Oracle: of a block's saved tensors, the results of its gate and up projections are as large
    as the limit."""
    model, copies = build(DEEP), LateCopies()
    host = ActivationOffload(torch.device("cpu"), min_bytes=2 * 24 * 48 * 4, copies=copies)
    checkpoint_blocks(model.layers, SELECTIVE, save=["mm"], offload=host)
    forward(model).backward()
    assert copies.events.count("away") == 2 * LAST


def test_streams_wait_for_events_and_the_host_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the calls in order (stream 0 computes, 1 copies); no accelerator is needed."""
    streams = RecordedStreams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    copies = StreamCopies(torch.device("cuda", 0))
    target = torch.zeros(3)
    mark = copies.start(target, torch.ones(3))
    copies.wait(mark)
    assert streams.log == ["1 waits for 0", "copied on 1", "1 marks", "0 waits for 1"]
    assert torch.equal(target, torch.ones(3))
