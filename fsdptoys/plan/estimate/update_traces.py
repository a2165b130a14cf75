"""Traces of the optimizer's part of a step: the run's own optimizer takes two steps on this rank's shards.

The shards are meta tensors under the recorder of a full trace; the first step also makes the states. Optimizer offload
streams through the project's own buckets, with copies that are only noted; Muon exchanges its matrices with ranks that
do not exist. A trace is cached for the life of the process, since it depends neither on batch nor activations.

Private functions of PyTorch that choose an implementation by device type are replaced: tested with torch 2.13.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from fsdptoys.config.schema import Config
from fsdptoys.device.profile import AttentionKind
from fsdptoys.memory.optimizer_offload import offload_optimizer
from fsdptoys.memory.transfers import Transfers
from fsdptoys.metrics.prediction import Category
from fsdptoys.optim import build_optimizer, muon
from fsdptoys.parallel.gradient_norms import norms_in, norms_in_float32, scale_gradients
from fsdptoys.plan.simulator import events
from fsdptoys.plan.simulator.events import COMPUTE_STREAM, Alloc, Event, Free, Mark
from fsdptoys.plan.trace.fake_device import replaced
from fsdptoys.plan.trace.op_recorder import OpRecorder
from fsdptoys.utils.uncached import Uncached

from .trace_writer import LOAD, STORE
from .unit_traces import join_kernels, kernels_of

MAKES_STATES = 1  # Number of the step that makes the states; later steps repeat the next one


class Shard(NamedTuple):
    """This rank's part of a parameter."""

    name: str
    shape: tuple[int, ...]  # Of the full parameter
    local: tuple[int, ...]
    dim: int | None  # Sharded dim; None if this rank has all of it
    in_block: bool


@dataclass(frozen=True)
class UpdateTrace:
    """Recorded steps, whose blocks and device events are numbered within them."""

    parts: dict[tuple[int, str], list[Event]]
    """Step and phase → events. Phases are ``construction``, ``norm``, ``scale``, ``update``, and the names of
    parameters or numbers of units that are updated apart from the others."""
    blocks: int
    device_events: int
    host_bytes: int
    skips_on_device: bool  # Whether no step waits until the host knows that its gradients are finite


@dataclass(frozen=True)
class Exchange:
    """The ranks among which Muon deals its matrices."""

    ranks: int
    axis: str


def trace_update(
    config: Config, units: Sequence[Sequence[Shard]], kind: AttentionKind, exchange: Exchange
) -> UpdateTrace:
    """Trace two steps over the shards of units, in the order of the forward, or return a cached trace."""
    memory = config.memory
    switches = {name: value for name, value in vars(memory).items() if name.startswith(("offload_", "optimizer_"))}
    settings = config.train.deterministic, config.train.sum_dtype, config.scales_gradients
    key = repr((config.optim, switches, settings))
    return _trace(key, tuple(map(tuple, units)), kind, exchange, Uncached(config))


@functools.lru_cache(maxsize=512)
def _trace(
    key: str, units: tuple[tuple[Shard, ...], ...], kind: AttentionKind, exchange: Exchange, source: Uncached[Config]
) -> UpdateTrace:
    config = source.value
    recorder = OpRecorder("meta", kind)
    transfers = _NotedCopies(recorder)
    shards = [shard for unit in units for shard in unit]
    with _optimizers_of(kind, shards, exchange, recorder), kernels_of(kind), recorder.watch():
        params = {shard.name: nn.Parameter(torch.empty(shard.local, device="meta")) for shard in shards}
        grads = {name: torch.empty_like(param) for name, param in params.items()}
        factor = torch.empty((), device="meta")
        modules = [nn.Identity() for _ in units]
        for tensor in (*params.values(), *grads.values()):
            recorder.see(tensor.detach())
        before = recorder.blocks
        recorder.mark(0, "construction")
        optimizer: Any = _built(config, shards, params)
        if config.memory.optimizer_offload:
            optimizer = offload_optimizer(
                optimizer,
                [(module, [params[each.name] for each in unit]) for module, unit in zip(modules, units, strict=True)],
                config.memory,
                device=SimpleNamespace(torch_device=factor.device),  # type: ignore[arg-type]
                model=nn.Identity(),
                schedule=config.memory.offload_schedule,
                seed=0,
                rank=0,
                transfers=transfers,
            )
        for step in (MAKES_STATES, MAKES_STATES + 1):
            for name, param in params.items():
                param.grad = grads[name]
            _step(recorder, step, optimizer, params, modules, factor, config, kind)
        recorder.objects = functools.partial(_states, optimizer)
        recorder.mark(MAKES_STATES + 1, "end")
        trace = recorder.finish()
    hidden = {*range(before + 1), *transfers.host_blocks}
    parts: dict[tuple[int, str], list[Event]] = {}
    for event in trace.events:
        if isinstance(event, Mark) and event.step < 0:
            continue  # of a matmul, after those of the forward
        if isinstance(event, Mark):
            current = parts.setdefault((event.step, event.phase), [])
        elif isinstance(event, Alloc):
            if event.block not in hidden:
                current.append(event._replace(category=trace.categories.get(event.block, event.category)))
        elif not isinstance(event, Free) or event.block not in hidden:
            current.append(event)
    parts = {key: join_kernels(part) for key, part in parts.items()}
    skips = kind is not AttentionKind.npu and getattr(optimizer, "skips_on_device", False)
    return UpdateTrace(parts, recorder.blocks, transfers.events, transfers.host_bytes, skips)


def _step(
    recorder: OpRecorder,
    step: int,
    optimizer: Any,
    params: dict[str, nn.Parameter],
    modules: Sequence[nn.Module],
    factor: Tensor,
    config: Config,
    kind: AttentionKind,
) -> None:
    """Take a step as the trainer does, with a mark before each part."""
    in_float32 = kind is not AttentionKind.cpu and not config.train.deterministic
    measure = norms_in_float32 if in_float32 else functools.partial(norms_in, config.train.sum_dtype.torch)
    if config.memory.optimizer_in_backward:
        group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
        groups = optimizer.param_groups
        for name, param in params.items():
            recorder.mark(step, name)
            measure([param.grad])  # type: ignore[list-item]
            optimizer.param_groups = [{**group_of[param], "params": [param]}]
            optimizer.step()
        optimizer.param_groups = groups
        return
    grads: list[Any] = [param.grad for param in params.values()]
    recorder.mark(step, "norm")
    measure(grads)
    if config.scales_gradients:
        if config.memory.optimizer_offload:
            optimizer.scale_gradients(factor)
        elif kind is not AttentionKind.npu and getattr(optimizer, "skips_on_device", False):
            optimizer.grad_scale, optimizer.found_inf = factor, factor
        else:
            recorder.mark(step, "scale")
            scale_gradients(grads, factor)
    recorder.mark(step, "update")
    optimizer.step()
    if config.memory.optimizer_offload and optimizer.executor.defers:
        for number, module in enumerate(modules):
            recorder.mark(step, str(number))
            module(factor)  # its hook updates the units that the forward needs
        optimizer.finish_updates()


def _built(config: Config, shards: Sequence[Shard], params: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    matrices = {shard.name for shard in shards if len(shard.shape) > 1}
    blocks = {shard.name for shard in shards if shard.in_block}
    return build_optimizer(config.optim, params.items(), matrices, blocks)


def _states(optimizer: Any) -> Iterator[tuple[Category, Tensor]]:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.device.type == "meta":
                yield Category.optimizer_states, value


class _NotedCopies(Transfers):
    """Notes copies as ``StreamTransfers`` makes them; host memory has no blocks."""

    def __init__(self, recorder: OpRecorder) -> None:
        self.device, self.recorder = torch.device("meta"), recorder
        self.events = self.host_bytes = 0
        self.host_blocks: set[int] = set()
        self._kept: list[Tensor] = []

    def host_tensor(self, elements: int, dtype: torch.dtype) -> Tensor:
        """A meta tensor that counts as host memory, in the sizes of PyTorch's pinned allocator."""
        made = torch.empty(elements, dtype=dtype, device="meta")
        self._kept.append(made)
        self.host_bytes += pinned_bytes(made.nbytes)
        if (storage := self.recorder.find(made)) is not None:
            self.host_blocks.add(storage.block)
        return made

    def device_tensor(self, elements: int, dtype: torch.dtype) -> Tensor:
        """See ``StreamTransfers``."""
        made = super().device_tensor(elements, dtype)
        self.recorder.categorize(made, Category.optimizer_states)
        storage = self.recorder.find(made)
        for stream in (LOAD, STORE) if storage is not None and storage.bytes else ():
            self.recorder.add(events.RecordStream(storage.block, stream))  # type: ignore[union-attr]
        return made

    def load(self, target: Tensor, source: Tensor, after: Sequence[Any]) -> int:
        """See ``StreamTransfers``."""
        return self._copy(LOAD, target.nbytes, after)

    def store(self, target: Tensor, source: Tensor, after: Sequence[Any]) -> int:
        """See ``StreamTransfers``."""
        return self._copy(STORE, target.nbytes, after)

    def mark(self) -> int:
        """See ``StreamTransfers``."""
        return self._record(COMPUTE_STREAM)

    def wait(self, event: Any) -> None:
        """See ``StreamTransfers``."""
        if event is not None:
            self.recorder.add(events.WaitEvent(event, COMPUTE_STREAM))

    def wait_on_host(self, event: Any) -> None:
        """See ``StreamTransfers``."""

    def _copy(self, stream: int, size: int, after: Sequence[Any]) -> int:
        for event in after:
            if event is not None:
                self.recorder.add(events.WaitEvent(event, stream))
        self.recorder.add(events.Transfer(stream, size, stream == LOAD, False))
        return self._record(stream)

    def _record(self, stream: int) -> int:
        self.events += 1
        self.recorder.add(events.RecordEvent(self.events, stream))
        return self.events


class _Generator(torch._C.Generator):
    """A host generator for any device; its numbers are never drawn."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator("cpu")


@contextmanager
def _optimizers_of(
    kind: AttentionKind, shards: Sequence[Shard], exchange: Exchange, recorder: OpRecorder
) -> Iterator[None]:
    """Let optimizers choose as on a device, and Muon deal matrices to ranks that do not exist."""
    devices = [] if kind is AttentionKind.cpu else ["meta"]
    by_shape = {shard.local: shard for shard in shards}

    def split(param: nn.Parameter, buffer: Tensor) -> list[muon.Matrix]:
        shard = by_shape[tuple(param.shape)]
        replicated = shard.dim is None and exchange.axis == "world"
        shares = exchange.ranks > 1 and (replicated or (shard.dim is not None and len(shard.shape) - shard.dim < 3))
        group: Any = exchange if shares else None
        views = [(param.detach(), param.grad, buffer)]
        inner = shard.dim
        if len(shard.shape) == 3:
            views = list(zip(param.detach().unbind(), param.grad.unbind(), buffer.unbind(), strict=True))  # type: ignore[union-attr]
            inner = None if not shard.dim else shard.dim - 1
        shape = (shard.shape[-2], shard.shape[-1])
        return [muon.Matrix(shape, *view, inner if shares else None, group) for view in views]  # type: ignore[arg-type]

    def exchanged(name: str, size: int) -> None:
        recorder.add(events.Collective(name, COMPUTE_STREAM, size, exchange.ranks, 1, exchange.axis))

    fake_dist = SimpleNamespace(
        get_rank=lambda group: 0,
        get_world_size=lambda group: exchange.ranks,
        all_to_all_single=lambda received, sent, *_, **__: exchanged("all_to_all", max(received.nbytes, sent.nbytes)),
        broadcast=lambda tensor, *_, **__: exchanged("broadcast", tensor.nbytes),
    )
    with replaced(
        (torch_optimizer, "_get_fused_kernels_supported_devices", lambda: ["meta"]),
        (torch_optimizer, "_get_foreach_kernels_supported_devices", lambda: devices),
        (torch, "Generator", _Generator),
        (muon, "dist", fake_dist),
        (muon, "split_matrices", split),
    ):
        yield


def pinned_bytes(size: int) -> int:
    """Bytes that PyTorch's pinned-memory allocator takes for a request: the next power of two."""
    return 1 << max(0, size - 1).bit_length()


def local_shape(shape: Sequence[int], elements: int, dim: int | None) -> tuple[int, ...]:
    """Shape of this rank's part of a parameter, flat if it is no part along the dim."""
    if dim is not None and elements:
        rest = math.prod(shape) // shape[dim]
        if elements % rest == 0:
            return (*shape[:dim], elements // rest, *shape[dim + 1 :])
    return tuple(shape) if elements == math.prod(shape) else (elements,)
