"""Activation offload: the moved tensors, the time of their return, and reuse of the host's buffers.

There is no stream here. Copies deferred until a wait simulate asynchronous ones.
"""

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdptoys.memory.activation_checkpointing import (
    GradientCheckpointing,
    checkpoint_blocks,
)
from fsdptoys.memory.activation_offload import ActivationOffload, Copies, StreamCopies
from fsdptoys.models import DecoderModel
from fsdptoys.models.layers import RunnableBlock
from fsdptoys.train.compile import compile_blocks
from tests.harness.blocks import (
    LLAMA,
    RecordedStreams,
    assert_equal,
    build,
    forward,
    gradients,
)

NONE, FULL, SELECTIVE = GradientCheckpointing
ATEN = torch.ops.aten


BLOCKS = 6
DEEP = dataclasses.replace(LLAMA, n_layers=BLOCKS)
LAST = BLOCKS - 1


class LateCopies(Copies):
    """Copies in order and as late as waits allow; until then a tensor on its way back holds NaN."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.buffers: set[int] = set()
        self._pending: list[Callable[[], Any]] = []
        self._finished = 0

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
        return self._finished + len(self._pending)

    def wait(self, mark: int) -> None:  # noqa: D102
        while self._finished < mark:
            self._pending.pop(0)()
            self._finished += 1

    def abandon(self, tensor: Tensor) -> None:  # noqa: D102
        self.events.append("abandoned")
        self.wait(self._finished + len(self._pending))


def offloaded(
    mode: GradientCheckpointing = FULL, **which: int
) -> tuple[DecoderModel, LateCopies]:
    model = build(DEEP)
    copies = LateCopies()
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
        block.register_full_backward_pre_hook(
            lambda *_, i=index: copies.events.append(f"asks {i}")
        )
        block.register_full_backward_hook(
            lambda *_, i=index: copies.events.append(f"done {i}")
        )
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
def test_host_buffers_are_allocated_once_and_reused(
    mode: GradientCheckpointing,
) -> None:
    """Oracle: allocations counted, with a shorter batch and an evaluation in between."""
    model, copies = offloaded(mode)
    forward(model).backward()
    count = len(copies.buffers)
    copied = copies.events.count("away")
    assert count == copied > 0
    for seed in (2, 3):
        forward(model, seed).backward()
        with torch.no_grad():
            forward(model)
    assert len(copies.buffers) == count
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
    count = len(copies.buffers)
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
    assert len(copies.buffers) == count
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
def test_parameters_and_inputs_without_gradient_stay_on_the_device(
    is_compiled: bool,
) -> None:
    """Oracle: one copy a block, of the output of the previous block."""
    blocks = [Masked() for _ in range(4)]
    copies = LateCopies()
    checkpoint_blocks(
        blocks,
        FULL,
        offload=ActivationOffload(torch.device("cpu"), min_bytes=0, copies=copies),
    )
    if is_compiled:
        compile_blocks(blocks, backend="aot_eager")
    hidden_BD = torch.randn(4, 8, requires_grad=True) * 1.0
    mask_BD = torch.ones(4, 8)
    for block in blocks:
        hidden_BD = block(hidden_BD, mask_BD)
    hidden_BD.sum().backward()
    assert copies.events == ["away"] * 3 + ["back"] * 2


def test_small_tensors_stay_on_the_device() -> None:
    """Oracle: of a block's saved tensors, the results of its gate and up projections are as large
    as the limit."""
    model = build(DEEP)
    copies = LateCopies()
    host = ActivationOffload(
        torch.device("cpu"), min_bytes=2 * 24 * 48 * 4, copies=copies
    )
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
