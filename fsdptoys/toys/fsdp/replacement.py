"""Replaced parameters: ``to_empty``, ``to``, ``load_state_dict(assign=True)`` and changes of ``requires_grad``."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .core import FSDPUnit
from .internals import local_tensor, set_local_tensor


class ReplaceableUnit(FSDPUnit):
    """A unit whose sharded parameters the user may replace."""

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over replaced parameters: their values move into a flat shard again.

        Waits for the rest where only some have been replaced.
        """
        if not self.params or self.is_whole:
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

        Args:
            root: module whose names for the parameters the error has.

        Raises:
            RuntimeError: if some are on the meta device.
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
        """Let whole parameters require gradients as the sharded ones do."""
        begun = self.gathering is not None
        super().wait()
        for param in self.params if begun else []:
            if param.whole is not None and param.whole.requires_grad != param.sharded.requires_grad:
                param.whole.requires_grad_(param.sharded.requires_grad)


def check_alike(params: Sequence[Tensor]) -> None:
    """Reject a unit with several dtypes or devices.

    Raises:
        NotImplementedError: naming them.
    """
    kinds = sorted({_kind(param) for param in params})
    if len(kinds) > 1:
        raise NotImplementedError(
            f"a unit keeps its parameters in one flat tensor and cannot mix {' and '.join(kinds)}; give the modules "
            "with each their own fully_shard, or list the others in ignored_params"
        )


def _kind(param: Tensor) -> str:
    return f"{param.dtype} on {param.device}"
