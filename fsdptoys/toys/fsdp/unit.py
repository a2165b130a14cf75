"""Ways to reduce and to compute: mixed precision, accumulation, replicas (HSDP), sums.

backward    | unit 3 |  unit 2       |  unit 1             |  end
unit 3               reduce-scatter ─▶ all-reduce (HSDP) ──▶ .grad
unit 2                                reduce-scatter ──────▶ all-reduce ▶ .grad
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .core import REDUCE_SCATTER, FSDPUnit, Homes
from .layout import Piece


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of a unit; the names are PyTorch's."""

    param_dtype: torch.dtype | None = None
    """Of whole parameters, and so of forward and backward; None for the dtype of the shards."""
    reduce_dtype: torch.dtype | None = None
    """Of reductions, and of gradients accumulated without one; None for that of the gradients."""
    cast_forward_inputs: bool = True
    """Cast inputs to ``param_dtype``."""


def averaging(
    ranks: int, dtype: torch.dtype, device: torch.device, factor: float | None, only_sums: bool
) -> tuple[Any, float, float]:
    """Choose how a reduction becomes a mean: by the collective, or by divisions around a sum.

    Args:
        ranks: number of ranks to combine.
        dtype: of the reduction.
        device: on a CPU we divide, since the mean of older versions of gloo is a sum.
        factor: divides instead of ``ranks``.
        only_sums: never leave the division to the collective.

    Returns:
        ``ReduceOp``, divisor of the input, divisor of the output.
    """
    wide = dtype in (torch.float32, torch.bfloat16)
    if wide and device.type != "cpu" and factor is None and not only_sums and ranks > 1:
        return dist.ReduceOp.AVG, 1.0, 1.0
    factor = float(ranks) if factor is None else factor
    before = 1.0
    if not wide:
        # float16 overflows at 65504: keep the sum as far from it as its parts are from underflow.
        while factor % before == 0 and factor / before > before:
            before *= 2
    return dist.ReduceOp.SUM, before, factor / before


class FullUnit(FSDPUnit):
    """A unit with a policy and options for its reduction.

    Args:
        homes, dims, reshards: as for ``FSDPUnit``.
        mesh: of one axis, or of two: replicate, shard.
        policy: dtypes.
    """

    reduces = True
    all_reduces = True
    """HSDP only: all-reduce over the replicas after the reduce-scatter."""
    divide_by: float | None = None
    """Instead of the number of ranks."""
    only_sums = False
    _partial: Tensor | None = None
    """Sum over the shards' ranks of earlier micro-batches, not yet all-reduced."""

    def __init__(
        self,
        homes: dict[nn.Parameter, Homes],
        dims: list[int],
        mesh: DeviceMesh,
        reshards: bool,
        policy: MixedPrecisionPolicy,
    ) -> None:
        kinds = sorted({_kind(param) for param in homes})
        if len(kinds) > 1:
            raise NotImplementedError(
                f"a unit has one flat tensor and cannot mix {' and '.join(kinds)}; give the "
                "modules with each their own fully_shard"
            )
        self.policy = policy
        self._accumulated: dict[int, Tensor] = {}
        """Whole gradients of earlier micro-batches in ``reduce_dtype``."""
        super().__init__(homes, dims, mesh, reshards)

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """Ranks with the same shard; None if the mesh has one axis."""
        return self.mesh.get_group(0) if self.mesh.ndim == 2 else None

    def gather_source(self) -> tuple[Tensor, list[Piece], dist.ProcessGroup]:
        """Return the shard, cast before it is sent."""
        shard_S = self.shard_S.to(self.policy.param_dtype or self.shard_S.dtype)
        return shard_S, self.pieces, self.group

    @torch.no_grad()
    def take_gradients(self) -> dict[int, Tensor]:
        """Remove whole gradients for a reduction, or accumulate them without one."""
        totals: dict[int, Tensor] = {}
        dtype = self.policy.reduce_dtype
        for index, param in enumerate(self.params):
            if param.whole is None:
                continue
            grad = param.whole.grad
            if grad is not None and index in self._accumulated:
                self._accumulated[index] += grad
                grad = None
            elif grad is not None and not self.reduces:
                if dtype is None or grad.dtype == dtype:
                    continue  # autograd adds the next one to it
                self._accumulated[index] = grad.to(dtype)
                grad = None
            param.whole.grad = None
            total = self._accumulated.pop(index, grad) if self.reduces else None
            if total is not None:
                totals[index] = total
        return totals

    @torch.no_grad()
    def reduce(self, grads: dict[int, Tensor]) -> Iterator[None]:
        """Average gradients over the ranks, and the replicas if there are any."""
        replicas = self.replicas
        all_reduces = self.all_reduces
        indices = list(grads)
        dtype = self.policy.reduce_dtype or grads[indices[0]].dtype
        ranks = self.ranks * (replicas.size() if replicas is not None else 1)
        op, before, after = averaging(
            ranks, dtype, self.shard_S.device, self.divide_by, self.only_sums
        )
        flat_RS, pieces = self.flatten(grads, dtype)
        if before != 1:
            flat_RS.div_(before)
        if self.ranks == 1:
            reduced_S = flat_RS.view(-1)
            del flat_RS
        else:
            reduced_S = flat_RS.new_empty(flat_RS.shape[1])
            work = getattr(dist, REDUCE_SCATTER)(
                reduced_S, flat_RS.view(-1), op=op, group=self.group, async_op=True
            )
            del flat_RS  # the work keeps it as long as it reads it; gloo's has a copy
            yield
            work.wait()
        if replicas is not None:
            if self._partial is not None:
                reduced_S += self._partial
                self._partial = None
            if not all_reduces:
                self._partial = reduced_S
                return
            work = dist.all_reduce(reduced_S, op=op, group=replicas, async_op=True)
            yield
            work.wait()
        if after != 1:
            reduced_S.div_(after)
        self.store(indices, pieces, reduced_S.to(self.params[indices[0]].sharded.dtype))

    def store(self, indices: list[int], pieces: list[Piece], reduced_S: Tensor) -> None:
        """Call the hooks of accumulated gradients too: autograd does not see sharded parameters."""
        super().store(indices, pieces, reduced_S)
        for index in indices:
            param = self.params[index].sharded
            hooks = getattr(param, "_post_accumulate_grad_hooks", None) or {}
            for hook in list(hooks.values()):
                hook(param)

    @torch.no_grad()
    def adopt(self) -> None:
        """Move replaced parameters into a flat shard again.

        ``to``, ``to_empty`` and ``load_state_dict(assign=True)`` replace them one by one; wait for
        the rest where only some have been replaced.
        """
        registered: list[Any] = []
        for param in self.params:
            module, name = param.homes[0]
            registered.append(module._parameters[name])
        parts = [param._local_tensor for param in registered]
        views = [piece.local_view(self.shard_S, self.rank) for piece in self.pieces]
        if any(part.is_meta for part in parts) or len({_kind(part) for part in parts}) != 1:
            return
        if all(map(_share_memory, parts, views)):
            return
        self.shard_S = parts[0].new_zeros(self.numel)
        for param, new, piece, part in zip(
            self.params, registered, self.pieces, parts, strict=True
        ):
            new._local_tensor = piece.local_view(self.shard_S, self.rank).copy_(part)
            param.sharded = new
            param.register(new)


def _kind(param: Tensor) -> str:
    return f"{param.dtype} on {param.device}"


def _share_memory(part: Tensor, view: Tensor) -> bool:
    return not part.numel() or part.data_ptr() == view.data_ptr()
