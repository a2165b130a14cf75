"""Record steps of the toys on two ranks of a CPU, for ``draw_toys``: computation, collectives and
memory.

Each strategy trains the same small model under the trainer, with no part of it replaced:

- times: ``torch.profiler`` over some steps; the fastest is kept. Gloo's works record begin and end
  in the profiler, hooks around the modules record their computation.
- parameters of each collective: one more step under ``CollectiveTrace``, whose calls come in the
  same order.
- memory: a second run under a dispatch mode that counts every tensor an operator creates until its
  storage ends, and resized storages. Scratch memory of operators and gloo's memory are not counted.
  (The profiler's count misses tensors whose last reference gloo's threads hold.)
"""

import functools
import json
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptoys.config.compose import compose_config
from fsdptoys.profiler.collective_table import block_of
from fsdptoys.profiler.collectives import Call, CollectiveTrace
from fsdptoys.profiler.dispatch import tensors_in
from fsdptoys.train.trainer import Trainer
from scripts.common.progress import unit

MARK = "toy:"
SKIPPED_STEPS = 3
"""Warmup: the toys learn the order of gradients, the optimizer creates its states."""
TIMED_STEPS = 40
"""The fastest is shown: other programs on the machine slow single steps down."""
MODEL = [
    "model=llama_debug",
    "model.dim=256",
    "model.n_layers=4",
    "model.ffn_dim=704",
    "model.vocab_size=1024",
    "data=synthetic",
    "train.seq_len=64",
    "train.batch_size=2",
    "metrics.console=none",
    "launch.device=cpu",
]


@dataclass
class Bar:
    """An interval, in seconds from the moment when the first rank began the step."""

    kind: str
    """``forward``, ``backward``, ``update``, or a collective."""
    label: str
    begin: float
    end: float


@dataclass
class Recorded:
    """One step of one rank."""

    seconds: float = 0.0
    computing: list[Bar] = field(default_factory=list)
    collectives: list[Bar] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    """Seconds from the step's begin, and live bytes from then on."""
    phases: dict[str, float] = field(default_factory=dict)
    """Phase → seconds from the step's begin, in the run that recorded memory."""
    memory_seconds: float = 0.0
    """Duration of the step in that run."""
    parameters: int = 0


def record(strategies: list[list[str]], bucket_mb: int) -> list[Recorded]:
    """Record every strategy on this rank, one after the other. A collective.

    Args:
        strategies: overrides that select each.
        bucket_mb: MiB of the buckets of DDP, ZeRO-1 and ZeRO-2.
    """
    recorded = []
    for overrides in strategies:
        name = overrides[0].removeprefix("parallel=")
        sized = (
            []
            if name in ("toy_zero3", "toy_fsdp", "fsdp1", "fsdp2")
            else [f"parallel.bucket_cap_mb={bucket_mb}"]
        )
        choose = functools.partial(_build, [*overrides, *sized])
        recording = Recorded()
        with unit(f"{name}, times", announce=dist.get_rank() == 0):
            _record_times(choose, recording)
            dist.barrier()
        with unit(f"{name}, memory", announce=dist.get_rank() == 0):
            _record_memory(choose, recording)
            dist.barrier()
        recorded.append(recording)
    return recorded


def _build(overrides: list[str], steps: int) -> Trainer:
    config = compose_config([*MODEL, *overrides, f"train.steps={steps}"])
    config.validate(dist.get_world_size(), "cpu")
    return Trainer(config)


def _record_times(build: Callable[[int], Trainer], recording: Recorded) -> None:
    traced = SKIPPED_STEPS + 1
    trainer = build(traced + TIMED_STEPS)
    recording.parameters = sum(trainer.parallel_model.parameter_sizes.values())
    calls: list[Call] = []
    trace = CollectiveTrace(traced, trainer.strategy.model, {}, calls.extend)
    trainer.on_phase = trace.enter
    marks = Marks(trainer)
    profiler = profile(activities=[ProfilerActivity.CPU])

    @contextmanager
    def around(step: int) -> Iterator[None]:
        if step <= traced:
            with trace.around(step):
                yield
            return
        if step == traced + 1:
            profiler.start()
            marks.on = True
        dist.barrier()  # all ranks begin together
        with record_function(f"{MARK}step {step}"):
            yield
        marks.finish()
        if step == traced + TIMED_STEPS:
            profiler.stop()

    trainer.around_step = around
    trainer.train()
    fastest = FastestStep(profiler)
    recording.seconds = fastest.seconds
    recording.computing += fastest.computing()
    recording.computing += [
        fastest.bar(event, "update", "")
        for event in fastest.events
        if "_fused_adam" in event["name"]
    ]
    gloo = [event for event in fastest.events if event["name"].startswith("gloo:")]
    assert len(gloo) == len(calls), (
        len(gloo),
        [call.collective for call in calls],
        [event["name"] for event in gloo],
    )
    for event, call in zip(gloo, calls, strict=True):
        if call.size_bytes > 1024:  # norms, counts and votes are a few bytes
            blocks = list(
                dict.fromkeys(
                    block_of(name).removeprefix("layers.") for name in call.parameters
                )
            )
            recording.collectives.append(
                fastest.bar(event, call.collective, _few(blocks))
            )


def _record_memory(build: Callable[[int], Trainer], recording: Recorded) -> None:
    last = SKIPPED_STEPS + 1
    begin = 0.0
    with LiveBytes().watch() as live:
        trainer = build(last)

        def on_phase(step: int, phase: str) -> None:
            recording.phases[phase] = time.perf_counter() - begin

        @contextmanager
        def around(step: int) -> Iterator[None]:
            nonlocal begin
            begin = time.perf_counter()
            yield
            recording.memory_seconds = time.perf_counter() - begin

        trainer.on_phase = on_phase
        trainer.around_step = around
        trainer.train()
    total = 0
    for moment, change in live.changes:
        total += change
        if begin <= moment <= begin + recording.memory_seconds:
            recording.memory.append((moment - begin, total))
        elif moment < begin:
            recording.memory = [(0.0, total)]


class LiveBytes(TorchDispatchMode):
    """Records when storages are created, freed and resized."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[float, int]] = []
        """Times of ``time.perf_counter``, and changes in bytes."""
        self._sizes: dict[int, tuple[int, Any]] = {}

    @contextmanager
    def watch(self) -> Iterator["LiveBytes"]:
        """Record until the end of the block."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            before, reference = self._sizes.get(storage._cdata, (size, None))
            self._sizes[storage._cdata] = (size, reference)
            self.changes.append((time.perf_counter(), size - before))
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", resized), self:
            yield self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and record the tensors that it creates."""
        if DTensor in types:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage.device.type == "cpu" and storage._cdata not in self._sizes:
                key = storage._cdata
                size = storage.nbytes()
                self._sizes[key] = (
                    size,
                    weakref.ref(storage, functools.partial(self._forget, key)),
                )
                self.changes.append((time.perf_counter(), size))
        return result

    def _forget(self, key: int, _: object) -> None:
        size, _reference = self._sizes.pop(key)
        self.changes.append((time.perf_counter(), -size))


class FastestStep:
    """The fastest of the marked steps of a profile, on all ranks the same. A collective."""

    def __init__(self, profiler: Any) -> None:
        events = _events_of(profiler)
        steps = [event for event in events if event["name"].startswith(f"{MARK}step ")]
        durations = torch.tensor([event["dur"] for event in steps], dtype=torch.float64)
        dist.all_reduce(durations, dist.ReduceOp.MAX)
        step = steps[int(durations.argmin())]
        begin = torch.tensor(step["ts"], dtype=torch.float64)
        dist.all_reduce(begin, dist.ReduceOp.MIN)
        end = step["ts"] + step["dur"]
        self.begin = begin.item()
        self.seconds = (end - self.begin) / 1e6
        within = [event for event in events if step["ts"] <= event["ts"] <= end]
        self.events = sorted(within, key=lambda event: event["ts"])

    def bar(self, event: dict[str, Any], kind: str, label: str) -> Bar:
        """Return an event as a bar."""
        begin = (event["ts"] - self.begin) / 1e6
        return Bar(kind, label, begin, begin + event["dur"] / 1e6)

    def computing(self) -> list[Bar]:
        """Return the marked forwards and backwards."""
        bars = []
        for event in self.events:
            if event["name"].startswith((f"{MARK}forward ", f"{MARK}backward ")):
                kind, label = event["name"].removeprefix(MARK).split(" ", 1)
                bars.append(self.bar(event, kind, label))
        return bars


def _events_of(profiler: Any) -> list[dict[str, Any]]:
    """Return a profile's events, with times in microseconds since the epoch."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    events: list[dict[str, Any]] = [
        event for event in trace["traceEvents"] if "name" in event and "ts" in event
    ]
    for event in events:
        event["ts"] += trace.get("baseTimeNanoseconds", 0) / 1e3
    return events


def _few(blocks: list[str]) -> str:
    """Abbreviate the first and the last of some blocks."""
    short = {"embed_tokens": "emb", "lm_head": "head"}
    names = [short.get(block, block) for block in blocks]
    return names[0] if len(names) == 1 else f"{names[0]}…{names[-1]}" if names else ""


class Marks:
    """Hooks, called after the strategy's own, that mark the computation of each module in the
    profile.

    A backward begins at the first gradient of a module's output, after the strategy's hooks, and
    ends when the input has its gradient. The embedding's backward has no such end, and is left out.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.on = False
        self._open: dict[str, Any] = {}
        model = next(
            module
            for module in trainer.strategy.model.modules()
            if hasattr(module, "embed_tokens")
        )
        layers: Any = model.layers
        parts: list[tuple[str, Any, Any]] = [
            ("emb", model.embed_tokens, model.embed_tokens)
        ]
        parts += [(str(number), layer, layer) for number, layer in enumerate(layers)]
        parts.append(("head", model.norm, model.lm_head))
        for label, first, last in parts:
            first.register_forward_pre_hook(
                functools.partial(self._begin_forward, label)
            )
            last.register_forward_hook(functools.partial(self._end_forward, label))

    def begin(self, name: str) -> None:
        """Begin an interval."""
        if self.on:
            self._open[name] = record_function(f"{MARK}{name}")
            self._open[name].__enter__()

    def end(self, name: str) -> None:
        """End an interval, if it has begun."""
        mark = self._open.pop(name, None)
        if mark is not None:
            mark.__exit__(None, None, None)

    def finish(self) -> None:
        """End all intervals."""
        for name in list(self._open):
            self.end(name)

    def _begin_forward(
        self, label: str, module: nn.Module, args: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        self.begin(f"forward {label}")
        hidden, *others = args
        if hidden.requires_grad:
            hidden = EndOfBackward.apply(
                hidden, functools.partial(self.end, f"backward {label}")
            )
        return (hidden, *others)

    def _end_forward(
        self, label: str, module: nn.Module, args: Any, output: Tensor
    ) -> None:
        self.end(f"forward {label}")
        if label != "emb":
            output.register_hook(lambda _: self.begin(f"backward {label}"))


class EndOfBackward(torch.autograd.Function):
    """Identity that calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, call: Callable[[], None]) -> Tensor:
        """Return the tensor."""
        ctx.call = call
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Call the function."""
        ctx.call()
        return grads[0], None
