"""``DistributedDataParallel`` with the arguments of PyTorch's class, on top of ``core``."""

import copy
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ..buckets import assign_buckets, broadcast_tensors
from ..tensor_tree import map_tensors
from .checks import check_devices, check_same_model
from .comm_hooks import HookedReducer, SparseBucket, sparse_weights
from .core import BUCKET_CAP_MB, DDP, MIB, Bucket
from .logging_data import LoggedReducer, describe

FIRST_BUCKET_BYTES = MIB
"""Without an explicit size: a small first bucket, so that communication begins early."""


class FullReducer(LoggedReducer, HookedReducer):
    """The reducer with all extensions; the parameters in ``sparse`` have sparse gradients."""

    def __init__(self, sparse: set[Tensor], *args: Any, **settings: Any) -> None:
        self.sparse = sparse
        super().__init__(*args, **settings)

    def make_buckets(self, numbers: Sequence[int], limits: Sequence[int]) -> list[Bucket]:
        """Allocate buckets; a sparse gradient has one of its own."""
        params = [self.params[number] for number in numbers]
        return [
            (SparseBucket if params[places[0]] in self.sparse else Bucket)(
                [numbers[place] for place in places], [params[place] for place in places]
            )
            for places in assign_buckets(params, limits, [param in self.sparse for param in params])
        ]


class DistributedDataParallel(DDP, Joinable):
    """A module whose gradients are averaged over ranks; the arguments are those of PyTorch's class, and ``overlap``.

    Args:
        module: on one device, the same on all ranks.
        device_ids: that device, to which inputs are moved; None on a CPU.
        broadcast_buffers: send rank 0's buffers before each forward; the older name of ``forward_sync_buffers``.
        init_sync: compare shapes and send rank 0's parameters at construction.
        bucket_cap_mb: MiB of the buckets; None for 25 after a first one of 1.
        bucket_cap_mb_list: MiB of the first bucket, the second, … and all others.
        find_unused_parameters: allow outputs or losses that do not depend on every parameter.
        gradient_as_bucket_view: make gradients views of the buckets instead of copies.
        static_graph: promise that the use of parameters never changes.
        forward_sync_buffers: send rank 0's buffers before each forward; the construction always sends them.
        overlap: send gradients during the backward; otherwise after it, to measure the gain of overlap.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Any = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        overlap: bool = True,
    ) -> None:
        unsupported = {
            "delay_all_reduce_named_params": delay_all_reduce_named_params,
            "param_to_hook_all_reduce": param_to_hook_all_reduce,
            "mixed_precision": mixed_precision,
            "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
            "batched_grad_copy": batched_grad_copy,
        }
        for name, value in unsupported.items():
            if value:
                raise NotImplementedError(f"the toy DistributedDataParallel has no {name}; leave it out")
        nn.Module.__init__(self)
        Joinable.__init__(self)
        if process_group is not None and device_mesh is not None:
            raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if device_mesh is not None and device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        if check_reduction:
            warnings.warn("The `check_reduction` argument is deprecated: it does nothing.", FutureWarning, stacklevel=2)
        if broadcast_buffers is not None:
            message = "`broadcast_buffers` is deprecated: use `forward_sync_buffers`."
            warnings.warn(message, FutureWarning, stacklevel=2)
        self.device_mesh = device_mesh
        self.process_group = device_mesh.get_group() if device_mesh is not None else process_group
        self.process_group = self.process_group or dist.group.WORLD
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        params = [param for name, param in module.named_parameters() if name not in self.parameters_to_ignore]
        self.device_ids, self.output_device = check_devices(params, device_ids, output_device)
        self.device = params[0].device
        if self.device.type == "cpu" and any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
            raise ValueError("SyncBatchNorm layers only work with GPU modules")
        self.module, self.dim = module, dim
        self.forward_sync_buffers = broadcast_buffers is not False
        sends_buffers_at_first = self.forward_sync_buffers
        if forward_sync_buffers is not None:
            self.forward_sync_buffers, sends_buffers_at_first = forward_sync_buffers, True
        self.find_unused_parameters, self.gradient_as_bucket_view = find_unused_parameters, gradient_as_bucket_view
        self.static_graph, self.overlap = static_graph, overlap
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._bucket_bytes = [FIRST_BUCKET_BYTES, BUCKET_CAP_MB * MIB]
        if bucket_cap_mb is not None:
            self._bucket_bytes = [int(bucket_cap_mb * MIB)]
        self.bucket_bytes_cap_list = [int(size * MIB) for size in bucket_cap_mb_list or ()]
        self._bucket_bytes = self.bucket_bytes_cap_list or self._bucket_bytes
        self.bucket_bytes_cap = max(self._bucket_bytes)
        if init_sync:
            check_same_model(params, self.process_group)
            self.send_states(0, sends_buffers_at_first)
        self._build_reducer()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module on its device, and prepare to reduce in its backward."""
        if self.device_ids is not None:
            inputs, kwargs = map_tensors((inputs, kwargs), lambda tensor: tensor.to(self.device, non_blocking=True))
        with torch.profiler.record_function("DistributedDataParallel.forward"):
            return super().forward(*inputs, **kwargs)

    def before_forward(self) -> None:
        """Rebuild buckets, send buffers, and exchange with ranks that have run out of data."""
        joining = Join.notify_join_context(self)
        if joining is not None:
            (active,) = joining.get_future().wait()
            self.reducer.divisor = self.reducer.world_size if self._divides_by_all else int(active.item())
        if torch.is_grad_enabled():
            self.reducer.begin_forward()
        if self.will_sync_module_buffers():
            source = self.common_rank(True) if self._join_config.enable else 0
            broadcast_tensors(self.own_buffers(), source, self.process_group)
        if self._join_config.enable:
            self.any_rank_reduces(self.require_backward_grad_sync)

    def after_forward(self, output: Any, reduces: bool) -> Any:
        """Announce the backward if it ``reduces``."""
        self.require_forward_param_sync = reduces
        return super().after_forward(output, reduces)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Replace the collective of each bucket by a function, once and before the first backward.

        Args:
            state: first argument of ``hook``.
            hook: called with the state and a bucket of undivided gradients; returns a future of the tensor that becomes
                the bucket's buffer.
        """
        self.reducer.register_comm_hook(state, hook)

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Surround a loop that takes fewer steps on some ranks than on others; see PyTorch's ``Join``."""
        settings = {"divide_by_initial_world_size": divide_by_initial_world_size}
        return Join([self], enable, throw_on_early_termination, **settings)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the collectives of a rank without data."""
        self._divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        return Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """Device on which ``Join`` counts ranks."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """Ranks that ``Join`` counts."""
        return self.process_group

    @property
    def broadcast_buffers(self) -> bool:
        """Older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    def will_sync_module_buffers(self) -> bool:
        """Return whether a forward sends buffers: not after a forward that did not prepare to reduce."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.own_buffers())

    def _build_reducer(self) -> None:
        kept: dict[nn.Parameter, str] = {}  # as PyTorch's: a shared parameter is ignored if all its names are
        for name, param in self.module.named_parameters(remove_duplicate=False):
            if param.requires_grad and name not in self.parameters_to_ignore:
                kept.setdefault(param, name)
        self.reducer: FullReducer = FullReducer(
            sparse_weights(self.module),
            kept,
            self.process_group,
            self._bucket_bytes,
            self.bucket_bytes_cap_list or (sys.maxsize,),
            as_views=self.gradient_as_bucket_view,
            find_unused=self.find_unused_parameters,
            static_graph=self.static_graph,
        )
        self.reducer.overlaps = self.overlap

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self.reducer.iterations:
            message = "set_static_graph() should be called before training loop starts, after the construction."
            self.reducer.fail(RuntimeError, message)
        self.static_graph = True
        self.reducer.set_static_graph()

    def own_buffers(self) -> list[Tensor]:
        """Return the module's buffers, without the ignored ones."""
        return [buffer for name, buffer in self.module.named_buffers() if name not in self.parameters_to_ignore]

    def send_states(self, source: int, buffers: bool) -> None:
        """Overwrite parameters, and on request buffers, with those of one rank."""
        own = [param for name, param in self.module.named_parameters() if name not in self.parameters_to_ignore]
        broadcast_tensors([*own, *(self.own_buffers() if buffers else [])], source, self.process_group)

    def common_rank(self, is_candidate: bool) -> int:
        """Return the highest rank among the candidates. A collective."""
        rank = torch.tensor([self.process_group.rank() if is_candidate else -1], device=self.device)
        dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=self.process_group)
        return int(rank.item())

    def any_rank_reduces(self, reduces: bool) -> bool:
        """Return whether any rank's backward will reduce. A collective."""
        flag = torch.full((1,), float(reduces), device=self.device)
        dist.all_reduce(flag, group=self.process_group)
        return flag.item() != 0

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Any) -> None:
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return describe(self)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            message = "DDP runtime logging sample rate should be equal or greater than 1"
            self.reducer.fail(ValueError, message)
        self.reducer.logbook.sample_rate = sample_rate

    def _remove_autograd_hooks(self) -> None:
        for handle in self.reducer.handles:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group != dist.group.WORLD:
            self.reducer.fail(
                RuntimeError, "DDP Pickling/Unpickling are only supported when using DDP with the default process group"
            )
        state = copy.copy(self.__dict__)
        del state["process_group"], state["reducer"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = dist.group.WORLD
        self._build_reducer()


class Shadow(JoinHook):
    """The collectives of a rank that has run out of data: it takes part in the others', with gradients of zero."""

    def __init__(self, ddp: "DistributedDataParallel") -> None:
        self.ddp = ddp

    def main_hook(self) -> None:
        """Take part in one forward and backward of the other ranks."""
        ddp = self.ddp
        ddp.reducer.begin_forward()
        if ddp.will_sync_module_buffers():
            broadcast_tensors(ddp.own_buffers(), ddp.common_rank(False), ddp.process_group)
        ddp.require_forward_param_sync = ddp.any_rank_reduces(False)
        if ddp.require_forward_param_sync:
            ddp.reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the model of a rank that had data to the end."""
        self.ddp.send_states(self.ddp.common_rank(is_last_joiner), self.ddp.forward_sync_buffers)
