"""The core of FSDP: each rank keeps 1/R of a unit's parameters, and gathers the others to compute.

    forward    pre_forward ── gather, wait ────────────────── module ──── post_forward: reshard
    backward   pre_backward ─ gather, wait, gather next ─ autograd ── post_backward: reshard, reduce

1. ``FSDPUnit``: a rank's part of a unit is one flat tensor of S elements with padding, which an
   all-gather sends as it is. Modules have sharded parameters (DTensors, views of it) or whole ones:
   views of one block. Its storage is resized to nothing and back, since autograd saved such views.
2. Collectives are asynchronous. ``FSDPUnit.reduce`` is a generator that yields where it would wait.
   The next unit's backward resumes it (``Reductions``), so that it overlaps with that computation.
3. ``UnitHooks`` calls both. The backward's next unit is the one that ended its forward before.
4. ``fully_shard`` makes a unit of a module's parameters; other files extend it by subclasses.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

from ..autograd import queue_callback
from ..tensor_tree import map_tensors, tensors_in
from .layout import Piece, lay_out

RENAMED = hasattr(dist, "all_gather_single")  # both in torch 2.13; the old names warn there
ALL_GATHER = "all_gather_single" if RENAMED else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if RENAMED else "reduce_scatter_tensor"
ALIGNMENT_BYTES = 512  # of whole parameters, as if allocated alone: kernels are slower elsewhere
Homes = list[tuple[nn.Module, str]]  # modules that have a parameter, and its names there
Phase = Literal["idle", "forward", "pre_backward", "post_backward"]
"""Of a unit; "pre_backward" begins with an output's gradient, "post_backward" after all inputs'."""


@dataclass
class UnitParameter:
    """One parameter of a unit."""

    homes: Homes
    sharded: nn.Parameter  # for the optimizer and state dicts
    whole: nn.Parameter | None = None  # for forward and backward; the same object in every step
    memory: Tensor | None = None  # of ``whole``, without the version counter that autograd watches

    def register(self, param: nn.Parameter) -> None:
        """Put one of its forms into all its homes."""
        for module, name in self.homes:
            module._parameters[name] = param  # setattr costs more than the rest of resharding


class FSDPUnit:
    """Parameters gathered together, in the order of the flat shard."""

    gathers_in_backward = reshards_after_backward = True

    def __init__(
        self, homes: dict[nn.Parameter, Homes], dims: list[int], mesh: DeviceMesh, reshards: bool
    ) -> None:
        self.mesh = mesh  # its last axis has the ranks
        self.dims = dims  # along which the parameters are cut
        self.reshards_after_forward = reshards  # frees whole parameters
        self.group = mesh.get_group(mesh.ndim - 1)
        self.ranks = self.group.size()
        self.rank = self.group.rank()
        self.shapes = [tuple(param.shape) for param in homes]
        self.pieces, self.numel = lay_out(self.shapes, dims, self.ranks)
        first = next(iter(homes), torch.empty(0))  # a unit may have no parameters
        self.shard_S = first.new_zeros(self.numel)
        self.params: list[UnitParameter] = []
        for index, (param, places) in enumerate(homes.items()):
            local = self.pieces[index].local_view(self.shard_S, self.rank)
            if not param.is_meta:
                local.copy_(self.pieces[index].local_part(param.detach(), self.rank))
            sharded = nn.Parameter(self.show_shard(index, local), param.requires_grad)
            self.params.append(UnitParameter(places, sharded))
            self.params[-1].register(sharded)
        self.block: Tensor | None = None  # memory of all whole parameters
        self.is_whole = False
        self.gathering: tuple[Tensor, list[Piece], dist.Work | None, Tensor] | None = None
        """All-gather in flight: ``flat_RS``, its layout, work, and the tensor that it sends."""

    def show_shard(self, index: int, local: Tensor) -> Tensor:
        """Return a chunk of a parameter, or of its gradient, as the optimizer sees it."""
        whole = torch.empty(self.shapes[index], device="meta")
        where = self.mesh, [*[Replicate()] * (self.mesh.ndim - 1), Shard(self.dims[index])]
        with torch.no_grad():  # keeps the conversion out of autograd's graph
            return DTensor.from_local(local, *where, shape=whole.shape, stride=whole.stride())

    @torch.no_grad()
    def gather(self) -> None:
        """Begin to make the parameters whole, unless they are or this has begun."""
        if not self.params or self.is_whole or self.gathering is not None:
            return
        shard_S, pieces, group = self.gather_source()
        if group.size() == 1:
            self.gathering = shard_S.view(1, -1), pieces, None, shard_S
            return
        flat = shard_S.new_empty(group.size() * shard_S.numel())
        work = getattr(dist, ALL_GATHER)(flat, shard_S, group=group, async_op=True)
        self.gathering = flat.view(group.size(), -1), pieces, work, shard_S

    def gather_source(self) -> tuple[Tensor, list[Piece], dist.ProcessGroup]:
        """Return the shard to send, its layout, and the ranks that have the other shards."""
        return self.shard_S, self.pieces, self.group

    def end_gathering(self) -> tuple[Tensor, list[Piece]] | None:
        """Wait for the all-gather in flight, if any; return its result and layout."""
        gathering, self.gathering = self.gathering, None
        if gathering is None:
            return None
        flat_RS, pieces, work, _ = gathering
        if work is not None:
            work.wait()
        return flat_RS, pieces

    @torch.no_grad()
    def wait(self) -> None:
        """Make the parameters whole, if ``gather`` has begun to."""
        if (gathered := self.end_gathering()) is None:
            return
        flat_RS, pieces = gathered
        self.allocate(flat_RS.dtype)
        for param, piece in zip(self.params, pieces, strict=True):
            assert param.whole is not None and param.memory is not None
            piece.read(param.memory, flat_RS)
            param.register(param.whole)
        self.is_whole = True

    def allocate(self, dtype: torch.dtype) -> None:
        """Allocate the memory of whole parameters, which are created with it the first time."""
        kind = dtype, self.shard_S.device
        if self.block is not None and (self.block.dtype, self.block.device) == kind:
            self.block.untyped_storage().resize_(self.block.nbytes)
            return
        step = ALIGNMENT_BYTES // dtype.itemsize
        sizes = [-(-math.prod(shape) // step) * step for shape in self.shapes]
        starts = itertools.accumulate(sizes, initial=0)
        with torch.inference_mode(False):  # autograd rejects tensors created in it
            self.block = torch.empty(sum(sizes), dtype=dtype, device=self.shard_S.device)
            for param, shape, start in zip(self.params, self.shapes, starts, strict=False):
                param.memory = self.block[start : start + math.prod(shape)].view(shape)
                param.whole = nn.Parameter(param.memory.data, param.sharded.requires_grad)

    def reshard(self) -> None:
        """Free the whole parameters."""
        self.end_gathering()
        if self.is_whole and self.block is not None:
            for param in self.params:
                param.register(param.sharded)
            self.block.untyped_storage().resize_(0)
            self.is_whole = False

    def take_gradients(self) -> dict[int, Tensor]:
        """Remove the whole gradients from the parameters; return them by index of the parameter."""
        grads: dict[int, Tensor] = {}
        for index, param in enumerate(self.params):
            if param.whole is not None and param.whole.grad is not None:
                grads[index], param.whole.grad = param.whole.grad, None
        return grads

    @torch.no_grad()
    def reduce(self, grads: dict[int, Tensor]) -> Iterator[None]:
        """Average whole gradients over the ranks, and free them; yield before each wait."""
        indices = list(grads)
        flat_RS, pieces = self.flatten(grads, grads[indices[0]].dtype)
        reduced_S = flat_RS.new_empty(flat_RS.shape[1])
        scatter = getattr(dist, REDUCE_SCATTER)
        work = scatter(reduced_S, flat_RS.view(-1), group=self.group, async_op=True)
        del flat_RS  # the work keeps it as long as it reads it; gloo's has a copy
        yield
        work.wait()
        self.store(indices, pieces, reduced_S.div_(self.ranks))

    def flatten(self, grads: dict[int, Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Piece]]:
        """Move whole gradients into one flat tensor; return it and its layout."""
        shapes = [self.shapes[i] for i in grads]
        pieces, numel = lay_out(shapes, [self.dims[i] for i in grads], self.ranks)
        flat_RS = self.shard_S.new_empty(self.ranks, numel, dtype=dtype)
        for index, piece in zip(list(grads), pieces, strict=True):
            piece.write(grads.pop(index), flat_RS)
        return flat_RS, pieces

    def store(self, indices: list[int], pieces: list[Piece], reduced_S: Tensor) -> None:
        """Add sharded gradients to those of the parameters."""
        for index, piece in zip(indices, pieces, strict=True):
            param = self.params[index].sharded
            grad = piece.local_view(reduced_S, self.rank)
            if param.grad is None:
                param.grad = self.show_shard(index, grad)
            else:
                param.grad._local_tensor.add_(grad)  # type: ignore[attr-defined]


class Reductions:
    """Reductions in flight, the oldest first."""

    def __init__(self) -> None:
        self.in_flight: list[Iterator[None]] = []

    def advance(self, *begun: Iterator[None]) -> None:
        """Resume all up to their next wait, then start the new ones."""
        steps = (*self.in_flight, *begun)
        self.in_flight = [step for step in steps if next(step, "complete") is None]

    def finish(self) -> None:
        """Complete all."""
        while self.in_flight:
            self.advance()


class Iteration:
    """State of a step that the units under one root share."""

    def __init__(self) -> None:
        self.hooks: list[UnitHooks] = []  # all units, the root first; empty until the first forward
        self.finished: list[UnitHooks] = []  # in the order of the forwards' ends, with repetitions
        self.awaits_end = False  # whether autograd will call ``end_backward``
        self.reductions = Reductions()

    def end_backward(self) -> None:
        """Catch up on units with inputs without gradient (an embedding); then end the step."""
        for hooks in self.hooks:
            hooks.end_backward()
        self.awaits_end = False
        self.end_step()

    def end_step(self) -> None:
        """Wait for all collectives."""
        for hooks in self.hooks:
            hooks.unit.end_gathering()
            hooks.turns.clear()
        self.finished.clear()
        self.reductions.finish()


class UnitHooks:
    """Hooks of the modules that need a unit, which may have no parameters."""

    def __init__(self, modules: Sequence[nn.Module], unit: FSDPUnit) -> None:
        self.modules = list(modules)
        self.unit = unit
        self.iteration = Iteration()
        self.phase: Phase = "idle"
        self.turns: list[int] = []  # indices in ``iteration.finished``
        for module in self.modules:
            module.register_forward_pre_hook(self.pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.post_forward, always_call=len(self.modules) > 1)

    def become_root(self) -> None:
        """Share one iteration with all units within this one, which computes first."""
        within = dict.fromkeys(hooks_of(module) for module in self.modules[0].modules())
        self.iteration.hooks = [hooks for hooks in within if hooks is not None]
        for hooks in self.iteration.hooks:
            hooks.iteration = self.iteration

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Make the parameters whole."""
        if not self.iteration.hooks:
            self.become_root()
        self.phase = "forward"
        self.unit.gather()
        self.unit.wait()
        return self.watch_inputs(args, kwargs)

    def watch_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Pass the inputs through a node that calls ``post_backward`` in its backward."""
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if not (inputs and self.unit.params and torch.is_grad_enabled()):
            return args, kwargs
        passed = iter(_AfterBackward.apply(self.post_backward, *inputs))
        return map_tensors((args, kwargs), lambda x: next(passed) if x.requires_grad else x)

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Reshard; have the first gradient of the output call ``pre_backward``."""
        self.leave_forward()
        self.phase = "idle"
        for tensor in tensors_in(output) if torch.is_grad_enabled() else []:
            if tensor.requires_grad:
                tensor.register_hook(self.pre_backward)
        return output

    def leave_forward(self) -> None:
        """Reshard, and record the order for the backward."""
        if self.unit.reshards_after_forward and self.unit.is_whole:
            self.unit.reshard()
        if torch.is_grad_enabled() and self.unit.params:
            self.turns.append(len(self.iteration.finished))
            self.iteration.finished.append(self)

    def pre_backward(self, grad: Tensor) -> Tensor:
        """Make the parameters whole again; begin to gather the unit that comes next."""
        if not self.iteration.awaits_end:
            self.iteration.awaits_end = True
            queue_callback(self.iteration.end_backward)
        if self.phase != "pre_backward":
            self.phase = "pre_backward"
            if self.unit.gathers_in_backward:
                self.unit.gather()
            self.unit.wait()
            self.prefetch_backward()
        return grad

    def prefetch_backward(self) -> None:
        """Begin to gather the unit that ended its forward before this one."""
        turn = self.turns.pop() if self.turns else 0
        if turn > 0 and self.iteration.finished[turn - 1].unit.gathers_in_backward:
            self.iteration.finished[turn - 1].unit.gather()

    def post_backward(self) -> None:
        """Reshard, and begin to reduce the gradients."""
        self.phase = "post_backward"
        grads = self.unit.take_gradients()
        if self.unit.reshards_after_backward:
            self.unit.reshard()
        self.iteration.reductions.advance(*([self.unit.reduce(grads)] if grads else []))

    def end_backward(self) -> None:
        """Catch up if the inputs had no gradient."""
        if self.phase != "post_backward":
            self.post_backward()
        self.phase = "idle"


class _AfterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, post_backward: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.post_backward = post_backward
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.post_backward()
        return (None, *grads)


def hooks_of(module: nn.Module) -> UnitHooks | None:
    """Return the hooks that ``fully_shard`` gave a module, if any."""
    return module.__dict__.get("_fsdp_hooks")


def take_parameters(modules: Sequence[nn.Module]) -> dict[nn.Parameter, Homes]:
    """Return the homes of each parameter that becomes part of the modules' unit."""
    homes: dict[nn.Parameter, Homes] = {}
    for owner in dict.fromkeys(inner for module in modules for inner in module.modules()):
        for name, param in owner.named_parameters(recurse=False, remove_duplicate=False):
            plain = not isinstance(param, DTensor)
            is_shared = plain and param.__dict__.setdefault("_unit", modules[0]) is not modules[0]
            if is_shared or hooks_of(modules[0]):
                raise ValueError(
                    f"the parameter {name!r} is in a unit already; make one unit of all that "
                    "have it"
                )
            if plain:
                homes.setdefault(param, []).append((owner, name))
    return homes


def fully_shard(module: Any, mesh: DeviceMesh, reshard_after_forward: bool = True) -> Any:
    """Make a unit of a module's parameters, except those of units within it.

    Call it bottom-up, with ``reshard_after_forward=False`` for the root: its backward comes next.
    """
    homes = take_parameters([module])
    hooks = UnitHooks([module], FSDPUnit(homes, [0] * len(homes), mesh, reshard_after_forward))
    module.__dict__["_fsdp_hooks"] = hooks
    return module
