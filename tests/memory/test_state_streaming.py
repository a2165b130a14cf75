"""Streaming buckets: the order of operations, the waits of asynchronous copies, and the state after
a step."""

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdptoys.device import Device
from fsdptoys.memory.bucketed_optimizer import BucketedOptimizer
from fsdptoys.memory.config import OffloadStateDType
from fsdptoys.memory.state_streaming import round_stochastically
from fsdptoys.memory.transfers import StreamTransfers, Transfers
from tests.harness.blocks import RecordedStreams
from tests.memory.stacks import (
    LAZY,
    PIPELINED,
    SERIAL,
    Stack,
    offload_stack,
    train_stack,
)


@dataclass(eq=False)
class Copy:
    """A copy issued on a stream and not yet made."""

    stream: str
    target: Tensor
    source: Tensor
    after: list[Any]


class Recorded(Transfers):
    """Records copies and updates of buckets; a copy is made immediately, or only at a wait: the
    worst times that events allow."""

    def __init__(self, eager: set[str]) -> None:
        super().__init__(Device("cpu"))
        self.eager = eager
        self.queues: dict[str, deque[Copy]] = {"load": deque(), "store": deque()}
        self.log: list[str] = []
        self._numbers: dict[int, int] = {}
        self._updates = 0

    def watch(self, optimizer: BucketedOptimizer) -> None:
        """Record the updates of its buckets; their slabs identify them."""
        for number, bucket in enumerate(optimizer.buckets):
            self._numbers[bucket.slab.data_ptr()] = number

            def update(
                flat: Tensor, original: Any = bucket.update, number: int = number
            ) -> None:
                self.log.append(f"update {number}")
                self._updates += 1
                original(flat)

            bucket.update = update  # type: ignore[method-assign]

    def mark(self) -> Any:
        """The number of updates so far."""
        return ("mark", self._updates)

    def wait(self, event: Any) -> None:
        """Make a copy, after the earlier ones in its stream and those that it must follow."""
        while isinstance(event, Copy) and event in self.queues[event.stream]:
            copy = self.queues[event.stream].popleft()
            for earlier in copy.after:
                self.wait(earlier)
            copy.target.copy_(copy.source)

    wait_on_host = wait

    def load(self, target: Tensor, source: Tensor, after: Any) -> Copy:
        """Issue it on the stream of loads."""
        return self._issue("load", target, source, after)

    def store(self, target: Tensor, source: Tensor, after: Any) -> Copy:
        """Issue it on the stream of stores."""
        assert ("mark", self._updates) in after, (
            "a store must wait for the update before it"
        )
        return self._issue("store", target, source, after)

    def _issue(self, stream: str, target: Tensor, source: Tensor, after: Any) -> Copy:
        slab = source if stream == "load" else target
        self.log.append(f"{stream} {self._numbers.get(slab.data_ptr())}")
        copy = Copy(stream, target, source, list(after))
        self.queues[stream].append(copy)
        if stream in self.eager:
            self.wait(copy)
        return copy


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("layers", [2, 3, 6])
@pytest.mark.parametrize(
    "dtype", list(OffloadStateDType), ids=lambda dtype: dtype.value
)
@pytest.mark.parametrize(
    "eager", [set(), {"load"}, {"store"}], ids=["late", "early loads", "early stores"]
)
@pytest.mark.parametrize("how", [SERIAL, PIPELINED, LAZY])
def test_events_order_asynchronous_copies_correctly(
    how: str, eager: set[str], dtype: OffloadStateDType, layers: int
) -> None:
    """Oracle: immediate copies; these run as early or as late as the events allow, over 3
    buffers."""
    memory = {"offload_state_dtype": dtype}
    plain = Stack(layers)
    perverse = Stack(layers)
    expected = train_stack(plain, optimizer := offload_stack(plain, how, **memory), 5)
    outputs = train_stack(
        perverse, other := offload_stack(perverse, how, Recorded(eager), **memory), 5
    )
    assert all(map(torch.equal, outputs, expected))
    for state, same in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(state[name], same[name]) for name in same)


def spell_out(text: str) -> list[str]:
    names = {"L": "load", "U": "update", "S": "store", "F": "forward"}
    return [f"{names[word[0]]} {word[1:]}" for word in text.split()]


@pytest.mark.parametrize(
    ("how", "in_step", "in_forward"),
    [
        (
            SERIAL,
            "L0 U0 S0 L1 U1 S1 L2 U2 S2 L3 U3 S3 L4 U4 S4 L5 U5 S5",
            "F0 F1 F2 F3 F4 F5",
        ),
        (
            PIPELINED,
            "L0 L1 L2 U0 S0 L3 U1 S1 L4 U2 S2 L5 U3 S3 U4 S4 U5 S5",
            "F0 F1 F2 F3 F4 F5",
        ),
        # A unit's optimizer step is issued before the forward of the previous unit.
        (
            LAZY,
            "L0 L1 L2",
            "U0 S0 L3 U1 S1 L4 F0 U2 S2 L5 F1 U3 S3 F2 U4 S4 F3 U5 S5 F4 F5",
        ),
    ],
)
def test_schedules_issue_loads_updates_and_stores_in_order(
    how: str, in_step: str, in_forward: str
) -> None:
    """Oracle: the order written out, for six units of one bucket each."""
    transfers = Recorded({"load", "store"})
    model = Stack()
    optimizer = offload_stack(model, how, transfers)
    transfers.watch(optimizer)
    for number, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(
            lambda *_, number=number: transfers.log.append(f"forward {number}")
        )
    model(torch.ones(1, 8)).sum().backward()
    transfers.log.clear()
    optimizer.step()
    assert transfers.log == spell_out(in_step)
    transfers.log.clear()
    model(torch.ones(1, 8))
    assert transfers.log == spell_out(in_forward)
    model(torch.ones(1, 8))
    assert transfers.log == spell_out(in_forward) + spell_out("F0 F1 F2 F3 F4 F5")


def copies(module: nn.Module) -> list[Tensor]:
    return [value.clone() for value in module.state_dict().values()]


def test_lazy_steps_are_independent_of_changes_before_the_next_forward() -> None:
    """Oracle: the plain optimizer, with the same changes made after its step."""
    outcomes = []
    for lazy in (False, True):
        model = Stack()
        optimizer = (
            offload_stack(model, LAZY)
            if lazy
            else torch.optim.AdamW(model.parameters(), lr=1e-2)
        )

        def step_with(
            grad: float,
            model: Stack = model,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> None:
            for param in model.parameters():
                param.grad = torch.full_like(param, grad)
            optimizer.step()

        for round_ in range(3):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 1e-2 / (round_ + 2)
            optimizer.zero_grad(set_to_none=False)
            step_with(0.1)  # a second step without a forward
            optimizer.zero_grad()
            with torch.no_grad():
                model.eval()(torch.ones(1, 8))
            model.train()
        # The last forward flushed everything; parameters may be read.
        values = [param.detach().clone() for param in model.parameters()]
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        values += copies(model)  # this one must flush
        step_with(0.2)
        values += copies(model.layers[3])
        ones = {
            name: torch.ones_like(value) for name, value in model.state_dict().items()
        }
        step_with(0.3)
        model.load_state_dict(ones)
        outcomes.append(values + copies(model))
    assert all(map(torch.equal, *outcomes))


def test_streams_are_created_once_and_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the waits written out, for one bucket (stream 0 computes, 1 loads, 2 stores); and
    plain copies' bits."""
    streams = RecordedStreams()
    monkeypatch.setattr(torch, "get_device_module", lambda _: streams)
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)

    class Unpinned(StreamTransfers):
        def host_tensor(self, elements: int, dtype: torch.dtype) -> Tensor:
            # Nothing can be pinned without an accelerator.
            return torch.zeros(elements, dtype=dtype)

    model = Stack(1)
    plain = Stack(1)
    optimizer = offload_stack(model, SERIAL, Unpinned(Device("cpu")))
    outputs = train_stack(model, optimizer, 2)
    assert streams.count == 3
    load_update_store = ["copied on 1", "0 waits for 1", "2 waits for 0", "copied on 2"]
    first = ["1 waits for 0", *load_update_store]
    assert streams.log == [*first, "1 waits for 2", *first, "host waits for 2"]
    assert all(
        map(torch.equal, outputs, train_stack(plain, offload_stack(plain, SERIAL), 2))
    )


@pytest.mark.parametrize("how", [SERIAL, PIPELINED, LAZY])
def test_failed_step_is_not_treated_as_done(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the step's own error first, and then one that describes the state of the
    parameters."""
    model = Stack()
    optimizer = offload_stack(model, how)
    model(torch.ones(4, 8)).sum().backward()

    def fail(_: Tensor) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(optimizer.buckets[2], "update", fail)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        optimizer.step()
        model(torch.ones(4, 8))
    for again in (
        optimizer.step,
        optimizer.flush,
        *([model.state_dict] if how == LAZY else []),
    ):
        with pytest.raises(RuntimeError, match="some parameters are old and some new"):
            again()


@pytest.mark.parametrize("how", [SERIAL, PIPELINED, LAZY])
def test_buffers_are_freed_with_the_step_unless_steps_are_deferred(how: str) -> None:
    """Oracle: whether the device's buffers are still alive."""
    buffers: list[weakref.ref[Tensor]] = []

    class Watched(Transfers):
        def device_tensor(self, elements: int, dtype: torch.dtype) -> Tensor:
            tensor = super().device_tensor(elements, dtype)
            buffers.append(weakref.ref(tensor))
            return tensor

    model = Stack()
    optimizer = offload_stack(model, how, Watched(Device("cpu")))
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(buffers) == {SERIAL: 2, PIPELINED: 6, LAZY: 3}[how]
    assert {reference() is not None for reference in buffers} == {how == LAZY}


def test_stochastic_rounding_is_unbiased_and_keeps_values_exact_in_bfloat16() -> None:
    """Oracle: the mean of 4,000 roundings within five standard errors, each at most half a step
    over sqrt(4000)."""
    values = torch.cat(
        [torch.linspace(1, 1.98, 33) + 1e-3, -torch.linspace(1, 1.98, 33) - 1e-3]
    )
    exact = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf"), -float("inf"), 2.0**-130])
    source = torch.cat([values, exact])
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros(len(values), dtype=torch.float64)
    target = torch.empty(len(source), dtype=torch.bfloat16)
    draws = 4000
    for _ in range(draws):
        round_stochastically(target, source, generator)
        total += target[: len(values)]
        step = 2.0**-7
        assert ((target[: len(values)].float() - values).abs() < step).all()
        assert torch.equal(target[len(values) :].float(), exact)
    assert ((total / draws - values).abs() < 5 * 0.5 * 2.0**-7 / draws**0.5).all()
    round_stochastically(target[:1], torch.tensor([float("nan")]), generator)
    assert target[0].isnan()
