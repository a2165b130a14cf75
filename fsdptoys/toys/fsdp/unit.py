"""The unit with all extensions, and two of its own: replaced parameters, and resharding to fewer ranks.

- ``to_empty``, ``to``, ``load_state_dict(assign=True)`` and changes of ``requires_grad`` replace sharded parameters.
- A smaller mesh between forward and backward: a smaller all-gather in the backward, for more memory in between.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from .core import Homes
from .gradients import GradientUnit
from .internals import as_dtensor, local_tensor, own_tensor, set_local_tensor
from .layout import Piece, lay_out
from .tensor_parallel import Outer, TensorParallelUnit

_origins = itertools.count()


class FullUnit(TensorParallelUnit, GradientUnit):
    """Parameters gathered together.

    Args:
        homes, dims, reshards_after_forward: as for ``FSDPUnit``.
        mesh: of one axis, or of two: replicate, shard.
        outers: the other mesh of each parameter, or None.
        smaller_mesh: its last axis has the ranks to reshard to after the forward; None to reshard fully.
        mp_policy: dtypes.
    """

    _smaller_S: Tensor | None = None
    """The shard over fewer ranks, between forward and backward."""

    def __init__(
        self,
        homes: dict[nn.Parameter, Homes],
        dims: Sequence[int],
        mesh: DeviceMesh,
        outers: Sequence[Outer | None],
        smaller_mesh: DeviceMesh | None,
        reshards_after_forward: bool,
        mp_policy: Any,
    ) -> None:
        check_alike([own_tensor(param) for param in homes])
        self.outers, self.smaller_mesh, self.mp_policy, self._accumulated = outers, smaller_mesh, mp_policy, {}
        self.origins = [param.__dict__.setdefault("_fsdp_origin", next(_origins)) for param in homes]
        """Numbers of the original parameters, the same in all units that share one."""
        super().__init__(homes, dims, mesh, reshards_after_forward and smaller_mesh is None)

    # Replaced parameters.

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over replaced parameters while fully sharded: their values move into a flat shard again.

        Waits for the rest where only some have been replaced.
        """
        if not self.params or self.is_whole or self._smaller_S is not None:
            return
        found = [module._parameters[name] for module, name in (param.homes[0] for param in self.params)]
        locals_ = [local_tensor(new) for new in found if new is not None]
        views = [piece.local_view(self.shard_S, self.rank) for piece in self.pieces]
        if any(local.is_meta or _kind(local) != _kind(locals_[0]) for local in locals_):
            return
        if all(
            new is param.sharded and (local.data_ptr() == view.data_ptr() or not local.numel())
            for new, param, local, view in zip(found, self.params, locals_, views, strict=True)
        ):
            return
        self.shard_S = locals_[0].new_zeros(self.shard_S.numel())
        for piece, param, new, local in zip(self.pieces, self.params, found, locals_, strict=True):
            assert new is not None
            set_local_tensor(new, piece.local_view(self.shard_S, self.rank).copy_(local))
            param.sharded = new
            param.register(new)

    def prepare(self, root: nn.Module) -> None:
        """Check before the first use that there are parameters to gather.

        Raises:
            RuntimeError: if some are on the meta device, with the names that ``root`` has for them.
        """
        self.adopt()
        without = {param.sharded for param in self.params if local_tensor(param.sharded).is_meta}
        if without:
            names = [name for name, param in root.named_parameters() if param in without]
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the following were still "
                f"on meta device: {names}\nFor example, call module.to_empty(device) and give them values"
            )
        check_alike([local_tensor(param.sharded) for param in self.params])

    def wait(self) -> None:
        """Let whole parameters require gradients as the sharded ones do; drop the shard over fewer ranks."""
        begun = self.gathering is not None
        super().wait()
        if self.is_whole:
            self._smaller_S = None
        for param in self.params if begun else []:
            if param.whole is not None and param.whole.requires_grad != param.sharded.requires_grad:
                param.whole.requires_grad_(param.sharded.requires_grad)

    # Fewer ranks.

    def gather_source(self) -> tuple[Tensor, list[Piece], dist.ProcessGroup]:
        """Return the shard, cast before it is sent, or the shard over fewer ranks, if there is one."""
        for param in self.params:
            refuse_extension(param.sharded, param.homes[0][1])
        if self.smaller_mesh is None or self._smaller_S is None:
            return self.shard_S.to(self.mp_policy.param_dtype or self.shard_S.dtype), self.pieces, self.group
        group = self.smaller_mesh.get_group(1)
        return self._smaller_S, lay_out(self.shapes, self.dims, group.size())[0], group

    @torch.no_grad()
    def shrink(self) -> None:
        """Reshard whole parameters to fewer ranks."""
        if self.smaller_mesh is None or not self.is_whole:
            return
        assert self.block is not None
        group = self.smaller_mesh.get_group(1)
        pieces, numel = lay_out(self.shapes, self.dims, group.size())
        self._smaller_S = self.block.new_zeros(numel)
        for param, piece in zip(self.params, pieces, strict=True):
            assert param.memory is not None
            local = piece.local_view(self._smaller_S, group.rank()).copy_(piece.local_part(param.memory, group.rank()))
            shown = as_dtensor(local, self.smaller_mesh, [Replicate(), Shard(piece.dim)], piece.shape)
            param.register(nn.Parameter(shown, param.sharded.requires_grad))
        self.block.untyped_storage().resize_(0)
        self.is_whole = False

    def stop_shrinking(self) -> None:
        """Reshard fully from now on."""
        if self._smaller_S is not None:
            self.reshard()
        self.smaller_mesh = None

    def reshard(self) -> None:
        """Drop the shard over fewer ranks."""
        super().reshard()
        if self._smaller_S is not None:
            for param in self.params:
                param.register(param.sharded)
            self._smaller_S = None


def refuse_extension(param: Tensor, name: str) -> None:
    """Reject PyTorch's all-gather extension by a NotImplementedError, also where it is set after ``fully_shard``."""
    if hasattr(own_tensor(param), "fsdp_pre_all_gather"):
        raise NotImplementedError(f"fsdp_pre_all_gather of {name!r} is not part of this implementation")


def check_alike(params: Sequence[Tensor]) -> None:
    """Reject a unit with several dtypes or devices by a NotImplementedError."""
    kinds = sorted({_kind(param) for param in params})
    if len(kinds) > 1:
        raise NotImplementedError(
            f"a unit keeps its parameters in one flat tensor and cannot mix {' and '.join(kinds)}; give the modules "
            "with each their own fully_shard, or list the others in ignored_params"
        )


def _kind(param: Tensor) -> str:
    return f"{param.dtype} on {param.device}"
