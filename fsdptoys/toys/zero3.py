"""ZeRO-3 from scratch: every tensor lives whole on one rank, and elsewhere only while it is used.

    rank 0 keeps   w1 w4          w1 ─┐ broadcast                          ┌ reduce → gradient of w1 at rank 0
    rank 1 keeps   w2             w2 ─┼─────────→ w1 w2 w3 on all, forward │ reduce → gradient of w2 at rank 1
    rank 2 keeps   w3             w3 ─┘           or backward, then freed ─┘ reduce → gradient of w3 at rank 2

The model is cut into units (its blocks, and the rest). What one rank owns of a unit is a share: one flat buffer, so a
unit takes at most N broadcasts. Around a unit's forward all shares are broadcast, and freed again; likewise around its
backward, after which every share's gradients are reduced to its owner and freed. One unit ahead is gathered while
another computes. Freeing resizes the storage to nothing and gathering resizes it back, so that all views, also those
that autograd saved for the backward, stay what they are. The part that is no block is gathered once for forward and
backward, since the head is the end of the one and the start of the other.

An optimizer over ``named_parameters()`` sees the tensors that its rank owns, whole: it may be of any kind. Nothing is
exchanged after its step; the next forward broadcasts what it did.

On each rank, for P of parameters and S of states: P/N parameters, P/N gradients, S/N states (to what balance
:mod:`.owners` finds), one or two units whole, and their gradients. A step broadcasts P in the forward and P in the
backward (the rest of the model once for both) and reduces P: what every rank receives or sends is about 3·P·(N−1)/N,
half as much again as DDP.

Deferred: parameters on the meta device get memory and values unit by unit, and only owners fill theirs.
All ranks must run the same blocks: a block's gather waits for every rank.
Left out: keeping no gradient where no rank used a parameter (it is zero here), reentrant checkpoints, parameters of two
blocks, number formats lower than the parameters'.
Source: arXiv:1910.02054 (P_os+g+p)
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .autograd_graph import queue_callback, tensors_in
from .buckets import views_like
from .partition import Evenness, assign_owners

IN_FLIGHT = 1
"""Units whose gradients are on their way at most, besides those of the unit that computes."""
Fill = Callable[[Tensor, str], None]


class Share:
    """What one rank owns of a unit, in one buffer; elsewhere the buffer has memory only while the unit is gathered."""

    def __init__(self, owner: int, names: list[str], params: list[nn.Parameter], device: torch.device) -> None:
        self.owner, self.names, self.params = owner, names, params
        self.elements = sum(param.numel() for param in params)
        self.flat = torch.empty(self.elements, dtype=params[0].dtype, device=device)
        self.views = views_like(self.flat, params)
        self.gradients: Tensor | None = None
        """Gradients of one backward, flat, from the first until they have arrived."""

    def resize(self, exists: bool) -> None:
        """Give the buffer memory, or take it."""
        storage = self.flat.untyped_storage()
        size = self.elements * self.flat.element_size() if exists else 0
        if storage.size() != size:
            storage.resize_(size)


class Unit:
    """Parameters that are gathered and freed together."""

    def __init__(self, shares: list[Share], stays: bool) -> None:
        self.shares = shares
        self.stays = stays
        """Whether it stays gathered from forward to backward."""
        self.works: list[Any] | None = None
        self.is_gathered = False
        frozen = [not param.requires_grad for share in shares for param in share.params]
        self.has_frozen, self.trainable = any(frozen), frozen.count(False)
        self.pending = self.trainable


class Zero3(nn.Module):
    """A module whose tensors are spread over ranks.

    Args:
        module: on the meta device, or the same on all ranks (each tensor's owner's values count).
        blocks: modules of it that become units, in the order of the forward.
        device: where tensors go.
        process_group: over whose ranks; None for all.
        fill: gives a parameter of the meta device its values; called by owners.
        evenness: what is balanced over the ranks.
        prefetch: gather the next unit while one computes.
        reduce_dtype: number format of the sums over ranks; None for the parameters'.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        device: torch.device,
        *,
        process_group: dist.ProcessGroup | None = None,
        fill: Fill | None = None,
        evenness: Evenness = Evenness.model,
        prefetch: bool = True,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.module, self.prefetch, self.reduce_dtype = module, prefetch, reduce_dtype
        self.group: Any = process_group or dist.group.WORLD
        self.ranks, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.owner_of: dict[nn.Parameter, int] = {}
        self.units = self._make_units(blocks, device, fill, evenness)
        self._places = {
            param: (unit, share, slot)
            for unit in self.units
            for share in unit.shares
            for slot, param in enumerate(share.params)
        }
        self._set_aside: dict[nn.Parameter, Tensor] = {}
        self._flying: list[tuple[Unit, list[Any]]] = []
        self._runs = False
        for number, computing in enumerate([module, *blocks]):
            computing.register_forward_pre_hook(functools.partial(self._before_forward, number))
            computing.register_forward_hook(functools.partial(self._after_forward, number))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def owned(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank, for an optimizer."""
        for name, param in self.module.named_parameters():
            if self.owner_of[param] == self.rank:
                yield name, param

    @torch.no_grad()
    def _make_units(
        self, blocks: Sequence[nn.Module], device: torch.device, fill: Fill | None, evenness: Evenness
    ) -> list[Unit]:
        """Cut the parameters into units and shares, which take their place one unit after the other."""
        names = {param: name for name, param in self.module.named_parameters()}
        of_blocks = [list(dict.fromkeys(block.parameters())) for block in blocks]
        within = {param for params in of_blocks for param in params}
        parts = [[param for param in names if param not in within], *of_blocks]
        owners = assign_owners(
            [[param.numel() * param.element_size() for param in part] for part in parts], self.ranks, evenness
        )
        units = []
        for number, (part, ranks) in enumerate(zip(parts, owners, strict=True)):
            shares = []
            for rank, dtype in dict.fromkeys((rank, param.dtype) for param, rank in zip(part, ranks, strict=True)):
                mine = [p for p, owner in zip(part, ranks, strict=True) if owner == rank and p.dtype == dtype]
                share = Share(rank, [names[param] for param in mine], mine, device)
                share.params = [self._install(share, slot, fill) for slot in range(len(mine))]
                share.resize(rank == self.rank)
                shares.append(share)
            units.append(Unit(shares, stays=number == 0))
        return units

    def _install(self, share: Share, slot: int, fill: Fill | None) -> nn.Parameter:
        """Put a view of a share in a parameter's place, with its values if this rank owns it."""
        param, view = share.params[slot], share.views[slot]
        if share.owner == self.rank and not param.is_meta:
            view.copy_(param)
        if param.is_meta:
            made = nn.Parameter(view, requires_grad=param.requires_grad)
            for module in self.module.modules():
                for name, own in list(module.named_parameters(recurse=False)):
                    if own is param:
                        module.register_parameter(name, made)
            param = made
            if fill is not None and share.owner == self.rank:
                fill(param, share.names[slot])
        else:
            param.data = view
        self.owner_of[param] = share.owner
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(self._take)
        return param

    @torch.no_grad()
    def _start_gather(self, unit: Unit) -> None:
        if unit.is_gathered or unit.works is not None:
            return
        unit.works = []
        for share in unit.shares:
            share.resize(True)
            source = dist.get_global_rank(self.group, share.owner)
            unit.works.append(dist.broadcast(share.flat, source, group=self.group, async_op=True))

    def gather(self, unit: Unit) -> None:
        """Have all of a unit's parameters here."""
        self._start_gather(unit)
        for work in unit.works or []:
            work.wait()
        unit.works, unit.is_gathered = None, True

    def release(self, unit: Unit) -> None:
        """Free what other ranks own of a unit."""
        if unit.is_gathered:
            for share in unit.shares:
                share.resize(share.owner == self.rank)
            unit.is_gathered = False

    def _before_forward(self, number: int, *_: object) -> None:
        self.gather(self.units[number])
        if self.prefetch and number + 1 < len(self.units):
            self._start_gather(self.units[number + 1])

    def _after_forward(self, number: int, module: nn.Module, inputs: Any, output: Any) -> None:
        unit = self.units[number]
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not (unit.stays and outputs):
            self.release(unit)
        for tensor in outputs:
            tensor.register_hook(functools.partial(self._before_backward, number))

    def _before_backward(self, number: int, *_: object) -> None:
        if not self._runs:
            self._runs = True
            self._next = len(self.units) - 1
            for param in self.owner_of:
                if param.grad is not None:  # of earlier backwards, and reduced already
                    self._set_aside[param], param.grad = param.grad, None
            queue_callback(self._finish)
        self.gather(self.units[number])
        if self.prefetch and number > 1:
            self._start_gather(self.units[number - 1])

    @torch.no_grad()
    def _take(self, param: Tensor) -> None:
        """Move a gradient into its share's buffer; free parameters, and send gradients, of units that are done."""
        unit, share, slot = self._places[param]  # type: ignore[index]
        assert param.grad is not None
        into = views_like(self._gradients_of(share), share.params)[slot]
        torch.mul(param.grad.to(into.dtype), 1.0 / self.ranks, out=into)
        param.grad = None
        unit.pending -= 1
        if unit.pending == 0 and not unit.has_frozen:
            self.release(unit)
        while self._next >= 0 and self.units[self._next].pending == 0:
            self._send_next()

    def _gradients_of(self, share: Share) -> Tensor:
        if share.gradients is None:
            share.gradients = torch.zeros_like(share.flat, dtype=self.reduce_dtype)
        return share.gradients

    def _send_next(self) -> None:
        """Reduce a unit's gradients to their owners; units go in their fixed order, from the last to the first."""
        unit = self.units[self._next]
        self._next -= 1
        while len(self._flying) >= IN_FLIGHT:
            self._land()
        works = []
        for share in unit.shares if unit.trainable else []:
            target = dist.get_global_rank(self.group, share.owner)
            works.append(dist.reduce(self._gradients_of(share), target, group=self.group, async_op=True))
        self._flying.append((unit, works))

    def _land(self) -> None:
        """Wait for the oldest unit's gradients, and keep those of this rank."""
        unit, works = self._flying.pop(0)
        for share, work in zip(unit.shares, works, strict=False):
            work.wait()
            gradients, share.gradients = self._gradients_of(share), None
            if share.owner != self.rank:
                continue
            means = views_like(gradients.to(share.flat.dtype), share.params)
            for param, mean in zip(share.params, means, strict=True):
                if param.requires_grad:
                    earlier = self._set_aside.pop(param, None)
                    param.grad = mean if earlier is None else earlier.add_(mean)

    @torch.no_grad()
    def _finish(self) -> None:
        """At the end of the backward: send what is left, wait for everything, free everything."""
        while self._next >= 0:
            self._send_next()
        while self._flying:
            self._land()
        for unit in self.units:
            if unit.works is not None:
                self.gather(unit)  # ahead of a backward that did not come
            self.release(unit)
            unit.pending = unit.trainable
        self._runs = False
