"""ZeRO-3: every tensor is whole on one rank, and on the others only while it is used.

    rank 0 keeps  w1 w4    w1 ─┐ broadcast                            ┌ reduce → gradient of w1 at 0
    rank 1 keeps  w2       w2 ─┼─────────→ w1 w2 w3 on all, forward   │ reduce → gradient of w2 at 1
    rank 2 keeps  w3       w3 ─┘           or backward, then freed   ─┘ reduce → gradient of w3 at 2

The model is cut into units: its blocks, and the rest. The tensors of a unit that one rank owns are
a share, one flat buffer, so a unit takes at most N broadcasts. All shares are broadcast before the
unit's forward and freed after it, and again around its backward, after which each share's gradients
are reduced to its owner and freed. The next unit is gathered while one computes. Freeing resizes a
storage to nothing and gathering resizes it back, so that views of it stay valid, also those that
autograd saved. The rest of the model is gathered once for forward and backward, since its head is
the end of one and the begin of the other.

An optimizer over ``owned()`` sees whole tensors and may be of any kind. Nothing is sent after its
step: the next forward broadcasts the updated tensors.

Each rank keeps P/N parameters, P/N gradients and 1/N of the states (as evenly as :mod:`.partition`
balances them), plus one or two whole units and their gradients. A step broadcasts P in the forward
and P in the backward (the rest of the model once for both) and reduces P: each rank sends or
receives about 3·P·(N−1)/N, half as much again as DDP.

Parameters on the meta device get memory and values unit by unit, on their owners only. All ranks
must run the same blocks: a block's gather waits for every rank. Left out: None as the gradient of
parameters that no rank uses (it is zero), reentrant checkpoints, parameters of two units, dtypes
other than the parameters'. Source: arXiv:1910.02054 (P_os+g+p)
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .autograd import queue_callback
from .buckets import views_like
from .partition import Evenness, assign_owners
from .tensor_tree import tensors_in

IN_FLIGHT = 1
"""Units with gradients in flight at most, besides those of the unit that computes."""
Fill = Callable[[Tensor, str], None]


class Share:
    """One rank's tensors of a unit, in one buffer; the other ranks free it between uses."""

    def __init__(
        self, owner: int, names: list[str], params: list[nn.Parameter], device: torch.device
    ) -> None:
        self.owner = owner
        self.names = names
        self.params = params
        self.elements = sum(param.numel() for param in params)
        self.flat = torch.empty(self.elements, dtype=params[0].dtype, device=device)
        self.views = views_like(self.flat, params)
        self.gradients: Tensor | None = None
        """Gradients of one backward, flat; from the first of them until they have arrived."""

    def resize(self, exists: bool) -> None:
        """Allocate or free the buffer."""
        storage = self.flat.untyped_storage()
        size = self.elements * self.flat.element_size() if exists else 0
        if storage.size() != size:
            storage.resize_(size)


class ModuleUnit:
    """Parameters gathered and freed together."""

    def __init__(self, shares: list[Share], stays: bool) -> None:
        self.shares = shares
        self.stays = stays
        """Gathered from forward to backward."""
        self.works: list[Any] | None = None
        self.is_gathered = False
        frozen = [not param.requires_grad for share in shares for param in share.params]
        self.has_frozen = any(frozen)
        self.trainable = frozen.count(False)
        self.pending = self.trainable


class Zero3(nn.Module):
    """A module with tensors that are distributed over ranks.

    Args:
        module: on the meta device, or the same on all ranks; the owner's values of each tensor are
            used.
        blocks: submodules that become units, in the order of the forward.
        device: device of the tensors.
        process_group: ranks to shard over; None for all.
        fill: sets the values of a parameter from the meta device; called with its name, on the
            owner only.
        evenness: balance over the model or in each unit.
        prefetch: gather the next unit while one computes.
        reduce_dtype: dtype of the sums over ranks; None for the parameters'.
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
        self.module = module
        self.prefetch = prefetch
        self.reduce_dtype = reduce_dtype
        self.group: Any = process_group or dist.group.WORLD
        self.ranks = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self.owner_of: dict[nn.Parameter, int] = {}
        self.units = self._make_units(blocks, device, fill, evenness)
        self._places = {
            param: (unit, share, slot)
            for unit in self.units
            for share in unit.shares
            for slot, param in enumerate(share.params)
        }
        self._earlier: dict[nn.Parameter, Tensor] = {}
        self._in_flight: list[tuple[ModuleUnit, list[Any]]] = []
        self._in_backward = False
        for number, computing in enumerate([module, *blocks]):
            computing.register_forward_pre_hook(functools.partial(self._before_forward, number))
            computing.register_forward_hook(functools.partial(self._after_forward, number))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def owned(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names and parameters that this rank owns, for an optimizer."""
        for name, param in self.module.named_parameters():
            if self.owner_of[param] == self.rank:
                yield name, param

    @torch.no_grad()
    def _make_units(
        self,
        blocks: Sequence[nn.Module],
        device: torch.device,
        fill: Fill | None,
        evenness: Evenness,
    ) -> list[ModuleUnit]:
        """Move the parameters into shares, one unit after the other."""
        names = {param: name for name, param in self.module.named_parameters()}
        within = {inner for block in blocks for inner in block.modules()}
        rest = [outer for outer in self.module.modules() if outer not in within]
        of_rest = dict.fromkeys(p for outer in rest for p in outer.parameters(recurse=False))
        parts = [list(of_rest), *(list(block.parameters()) for block in blocks)]
        units_of = Counter(itertools.chain(*parts))
        if shared := [name for param, name in names.items() if units_of[param] > 1]:
            raise ValueError(
                f"two units have the parameter {shared[0]!r}; make one block of all that have "
                "it, or none"
            )
        sizes = [[param.nbytes for param in part] for part in parts]
        owners = assign_owners(sizes, self.ranks, evenness)
        units = []
        for number, (part, ranks) in enumerate(zip(parts, owners, strict=True)):
            shares = []
            kinds = [(rank, param.dtype) for rank, param in zip(ranks, part, strict=True)]
            for kind in dict.fromkeys(kinds):
                mine = [param for param, own in zip(part, kinds, strict=True) if own == kind]
                rank = kind[0]
                share = Share(rank, [names[param] for param in mine], mine, device)
                share.params = [self._install(share, slot, fill) for slot in range(len(mine))]
                share.resize(rank == self.rank)
                shares.append(share)
            units.append(ModuleUnit(shares, stays=number == 0))
        return units

    def _install(self, share: Share, slot: int, fill: Fill | None) -> nn.Parameter:
        """Make a parameter a view of its share, with values if this rank owns it."""
        param = share.params[slot]
        view = share.views[slot]
        if share.owner == self.rank and not param.is_meta:
            view.copy_(param)
        if param.is_meta:
            installed = nn.Parameter(view, requires_grad=param.requires_grad)
            for module in self.module.modules():
                for name, own in list(module.named_parameters(recurse=False)):
                    if own is param:
                        module.register_parameter(name, installed)
            param = installed
            if fill is not None and share.owner == self.rank:
                fill(param, share.names[slot])
        else:
            param.data = view
        self.owner_of[param] = share.owner
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(self._take)
        return param

    @torch.no_grad()
    def _start_gather(self, unit: ModuleUnit) -> None:
        if unit.is_gathered or unit.works is not None:
            return
        unit.works = []
        for share in unit.shares:
            share.resize(True)
            source = dist.get_global_rank(self.group, share.owner)
            unit.works.append(dist.broadcast(share.flat, source, group=self.group, async_op=True))

    def gather(self, unit: ModuleUnit) -> None:
        """Wait until this rank has all parameters of a unit."""
        self._start_gather(unit)
        for work in unit.works or []:
            work.wait()
        unit.works = None
        unit.is_gathered = True

    def release(self, unit: ModuleUnit) -> None:
        """Free the shares of a unit that other ranks own."""
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
        if not self._in_backward:
            self._in_backward = True
            self._next = len(self.units) - 1
            for param in self.owner_of:
                if param.grad is not None:  # of earlier backwards, already reduced
                    self._earlier[param], param.grad = param.grad, None
            queue_callback(self._finish)
        self.gather(self.units[number])
        if self.prefetch and number > 1:
            self._start_gather(self.units[number - 1])

    @torch.no_grad()
    def _take(self, param: Tensor) -> None:
        """Move a gradient into its share's buffer; free and send what is finished."""
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
        """Reduce a unit's gradients to their owners, from the last unit to the first."""
        unit = self.units[self._next]
        self._next -= 1
        while len(self._in_flight) >= IN_FLIGHT:
            self._receive()
        works = []
        for share in unit.shares if unit.trainable else []:
            target = dist.get_global_rank(self.group, share.owner)
            gradients = self._gradients_of(share)
            works.append(dist.reduce(gradients, target, group=self.group, async_op=True))
        self._in_flight.append((unit, works))

    def _receive(self) -> None:
        """Wait for the oldest unit's gradients; keep those that this rank owns."""
        unit, works = self._in_flight.pop(0)
        for share, work in zip(unit.shares, works, strict=False):
            work.wait()
            gradients = self._gradients_of(share)
            share.gradients = None
            if share.owner != self.rank:
                continue
            means = views_like(gradients.to(share.flat.dtype), share.params)
            for param, mean in zip(share.params, means, strict=True):
                if param.requires_grad:
                    earlier = self._earlier.pop(param, None)
                    param.grad = mean if earlier is None else earlier.add_(mean)

    @torch.no_grad()
    def _finish(self) -> None:
        """End the backward: send the remaining gradients, wait for all, free all."""
        while self._next >= 0:
            self._send_next()
        while self._in_flight:
            self._receive()
        for unit in self.units:
            if unit.works is not None:
                self.gather(unit)  # prefetched for a backward that did not come
            self.release(unit)
            unit.pending = unit.trainable
        self._in_backward = False
