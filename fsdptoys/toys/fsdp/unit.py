"""The unit with all extensions."""

import itertools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .core import Homes
from .gradients import GradientUnit
from .internals import own_tensor
from .replacement import check_alike
from .smaller_mesh import ShrinkingUnit
from .tensor_parallel import Outer, TensorParallelUnit


class FullUnit(TensorParallelUnit, GradientUnit, ShrinkingUnit):
    """Parameters gathered together.

    Args:
        homes: as for ``FSDPUnit``.
        dims: as for ``FSDPUnit``.
        mesh: of one axis, or of two: replicate, shard.
        outers: the other mesh of each parameter, or None.
        smaller_mesh: ranks to reshard to after the forward; None to reshard fully.
        reshards_after_forward: as for ``FSDPUnit``.
        mp_policy: dtypes.
    """

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
        self.origins = [_origin(param) for param in homes]
        """Numbers of the original parameters, the same in all units that share one."""
        super().__init__(homes, dims, mesh, reshards_after_forward and smaller_mesh is None)


_origins = itertools.count()


def _origin(param: nn.Parameter) -> int:
    known: int | None = getattr(param, "_fsdp_origin", None)
    if known is None:
        known = next(_origins)
        setattr(param, "_fsdp_origin", known)  # noqa: B010
    return known
