"""A unit: the parameters that are gathered together, their gradients, and the three forms that they take.

    sharded ──── gather, wait ────▶ whole ──── reshard ────▶ sharded
       ▲                              │
       └───────── reshard ◀─ smaller ◀┘     (only where a number of ranks to reshard to was given)

What the modules have registered changes with the form: DTensors that are views of the flat shard, or ordinary
parameters in one block of memory, whose storage is resized to nothing and back. It is never another storage: what
autograd saved in the forward are views of it, and must find the values in the backward. Writing goes through tensors
of their own, whose version counters autograd does not look at, or it would think that a saved tensor was changed.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .internals import local_tensor, own_tensor, register, set_local_tensor
from .shard import FlatShard, Gathering
from .tensor_parallel import Outer
from .tensors import set_storage

ALIGNMENT_BYTES = 512
"""Whole parameters begin at multiples of this, as if each were allocated by itself: kernels are slower elsewhere."""


class Form(Enum):
    """What the modules have registered."""

    sharded = "sharded"
    smaller = "smaller"
    """Sharded over fewer ranks, between forward and backward."""
    whole = "whole"


class Phase(Enum):
    """What a unit, or the module that it belongs to, goes through in a step."""

    idle = "idle"
    forward = "forward"
    pre_backward = "pre_backward"
    """From the first gradient of an output on."""
    post_backward = "post_backward"
    """Once the gradients of all parameters are there."""


Homes = list[tuple[nn.Module, str]]
"""Where a parameter is registered, and under which names: several, where it is shared."""


@dataclass
class UnitParameter:
    """One parameter of a unit."""

    homes: Homes
    origin: int
    """A number that a parameter keeps in all units that it is given to."""
    sharded: nn.Parameter
    """A DTensor; what optimizers and state dicts see."""
    whole: nn.Parameter | None = None
    """What forward and backward see; the same object in every step."""
    memory: Tensor | None = None
    """The memory of ``whole``, to write to."""
    accumulated: Tensor | None = None
    """Whole gradient of earlier micro-batches, where it is kept in ``reduce_dtype``."""

    def register(self, param: nn.Parameter) -> None:
        """Let all modules that share it have this form of it."""
        for module, name in self.homes:
            register(module, name, param)


class Unit:
    """Parameters that are gathered together.

    Args:
        homes: whole parameter → where it is registered, in the order of the flat shard.
        dims: along which each is sharded.
        outers: the other mesh of those that have one.
        mesh: of one axis, or of two: replicate, shard.
        smaller: the mesh to reshard to after the forward; None to reshard fully.
        reshards: whether to reshard after the forward at all.
        mp_policy: number formats.
    """

    def __init__(
        self,
        homes: dict[nn.Parameter, Homes],
        dims: Sequence[int],
        outers: Sequence[Outer | None],
        mesh: DeviceMesh,
        smaller: DeviceMesh | None,
        reshards: bool,
        mp_policy: Any,
    ) -> None:
        shapes = [tuple(own_tensor(param).shape) for param in homes]
        self.mp_policy = mp_policy
        self.shard = FlatShard(mesh, shapes, dims, outers)
        self.smaller = FlatShard(smaller, shapes, dims, outers) if smaller is not None else None
        self.reshards_after_forward = reshards
        self.reshards_after_backward = True
        self.gathers_in_backward = True
        self.form, self.phase = Form.sharded, Phase.idle
        self.gathering: Gathering | None = None
        self.params: list[UnitParameter] = []
        self._block: Tensor | None = None
        if homes:
            self._shard(homes)

    @torch.no_grad()
    def _shard(self, homes: dict[nn.Parameter, Homes]) -> None:
        wholes = [own_tensor(param) for param in homes]
        _check_alike(wholes)
        first = wholes[0]
        self.shard.data = first.new_zeros(self.shard.numel)
        for index, (param, places) in enumerate(homes.items()):
            local = self.shard.view(index)
            if not param.is_meta:
                local.copy_(self.shard.cut(index, wholes[index]))
            sharded = nn.Parameter(self.shard.dtensor(index, local), param.requires_grad)
            self.params.append(UnitParameter(places, _origin(param), sharded))
            self.params[-1].register(sharded)

    @property
    def device(self) -> torch.device:
        """Of the shards."""
        assert self.shard.data is not None
        return self.shard.data.device

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over parameters that somebody replaced: ``to_empty``, ``to``, ``load_state_dict(assign=True)``.

        Their values move into a flat shard again. Where only a part of them was replaced so far, that waits for the
        rest.
        """
        if not self.params or self.form is not Form.sharded:
            return
        found = [module._parameters[name] for module, name in (param.homes[0] for param in self.params)]
        locals_ = [local_tensor(each) for each in found if each is not None]
        views = [self.shard.view(index) for index in range(len(self.params))]
        if any(local.is_meta or _kind(local) != _kind(locals_[0]) for local in locals_):
            return
        if all(
            new is param.sharded and (local.data_ptr() == view.data_ptr() or not local.numel())
            for new, param, local, view in zip(found, self.params, locals_, views, strict=True)
        ):
            return
        self.shard.data = locals_[0].new_zeros(self.shard.numel)
        for index, (param, new, local) in enumerate(zip(self.params, found, locals_, strict=True)):
            view = self.shard.view(index).copy_(local)
            assert new is not None
            set_local_tensor(new, view)
            param.sharded = new
            param.register(new)

    def prepare(self, root: nn.Module) -> None:
        """Check before the first use that there are parameters to gather.

        Args:
            root: in which they have the names that are told.

        Raises:
            RuntimeError: if some have no memory.
        """
        self.adopt()
        without = {param.sharded for param in self.params if local_tensor(param.sharded).is_meta}
        if without:
            names = [name for name, param in root.named_parameters() if param in without]
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the following were still "
                f"on meta device: {names}\nFor example, call module.to_empty(device) and give them values"
            )
        _check_alike([local_tensor(param.sharded) for param in self.params])

    # Between the forms.

    @torch.no_grad()
    def gather(self) -> None:
        """Begin to make the parameters whole, unless that has begun or is done."""
        if not self.params or self.form is Form.whole or self.gathering is not None:
            return
        source = self.smaller if self.form is Form.smaller else self.shard
        assert source is not None and source.data is not None
        self.gathering = source.gather(self.mp_policy.param_dtype or source.data.dtype)

    @torch.no_grad()
    def wait(self) -> None:
        """Have whole parameters, if ``gather`` has begun to make them."""
        gathering, self.gathering = self.gathering, None
        if gathering is None:
            return
        gathering.wait()
        set_storage(self._whole_block(gathering.flat_RS.dtype), allocated=True)
        for param, piece in zip(self.params, gathering.pieces, strict=True):
            assert param.whole is not None and param.memory is not None
            piece.read(param.memory, gathering.flat_RS)
            if param.whole.requires_grad != param.sharded.requires_grad:
                param.whole.requires_grad_(param.sharded.requires_grad)
            param.register(param.whole)
        self._forget_smaller()
        self.form = Form.whole

    def drop(self) -> None:
        """Give up a gathering that nobody needs."""
        gathering, self.gathering = self.gathering, None
        if gathering is not None:
            gathering.wait()

    def reshard(self) -> None:
        """Free the whole parameters."""
        self.drop()
        if self.form is Form.sharded:
            return
        for param in self.params:
            param.register(param.sharded)
        if self._block is not None:
            set_storage(self._block, allocated=False)
        self._forget_smaller()
        self.form = Form.sharded

    @torch.no_grad()
    def reshard_after_forward(self) -> None:
        """Do what was asked for between forward and backward."""
        if not self.reshards_after_forward or self.form is not Form.whole:
            return
        if self.smaller is None:
            self.reshard()
            return
        assert self._block is not None
        self.smaller.data = self._block.new_zeros(self.smaller.numel)
        for index, param in enumerate(self.params):
            assert param.memory is not None
            local = self.smaller.view(index).copy_(self.smaller.cut(index, param.memory))
            param.register(nn.Parameter(self.smaller.dtensor(index, local), param.sharded.requires_grad))
        set_storage(self._block, allocated=False)
        self.form = Form.smaller

    def stop_shrinking(self) -> None:
        """Reshard fully from now on, where a smaller number of ranks was given."""
        if self.form is Form.smaller:
            self.reshard()
        self.smaller = None

    def _forget_smaller(self) -> None:
        if self.smaller is not None:
            self.smaller.data = None

    def _whole_block(self, dtype: torch.dtype) -> Tensor:
        """The one block of memory of all whole parameters, which are made with it, the first time."""
        if self._block is not None and self._block.dtype == dtype and self._block.device == self.device:
            return self._block
        step = ALIGNMENT_BYTES // dtype.itemsize
        starts = [0]
        for shape in self.shard.shapes:
            starts.append(starts[-1] + -(-math.prod(shape) // step) * step)
        with torch.inference_mode(False):  # autograd takes no tensors that were made in it
            self._block = torch.empty(starts[-1], dtype=dtype, device=self.device)
            for param, shape, start, outer in zip(
                self.params, self.shard.shapes, starts, self.shard.outers, strict=False
            ):
                param.memory = self._block[start : start + math.prod(shape)].view(shape)
                whole = param.memory.data if outer is None else outer.show_whole(param.memory.data)
                param.whole = nn.Parameter(whole, param.sharded.requires_grad)
        return self._block


_origins = itertools.count()


def _origin(param: nn.Parameter) -> int:
    known: int | None = getattr(param, "_fsdp_origin", None)
    if known is None:
        known = next(_origins)
        setattr(param, "_fsdp_origin", known)  # noqa: B010
    return known


def _kind(param: Tensor) -> str:
    return f"{param.dtype} on {param.device}"


def _check_alike(params: Sequence[Tensor]) -> None:
    kinds = sorted({_kind(param) for param in params})
    if len(kinds) > 1:
        raise NotImplementedError(
            f"a unit keeps its parameters in one flat tensor and cannot mix {' and '.join(kinds)}; give the modules "
            "with each their own fully_shard, or list the others in ignored_params"
        )
