"""DistributedDataParallel from scratch: the whole model on every rank, gradients averaged while the backward runs.

    rank 0   batch 0 → forward → backward ─┐                    ┌→ the same average → the same step
                                           ├─ all-reduce (mean) ┤
    rank 1   batch 1 → forward → backward ─┘                    └→ the same average → the same step

All ranks start from rank 0's parameters and update with the same averages, so they stay equal without ever sending
parameters again. What is hard is not the average but its time: :mod:`.reducer` sends gradients in buckets while
autograd still computes others. This page is the rest: a module that looks like PyTorch's, which checks its arguments,
sends buffers (running statistics, say) from rank 0 before each forward, leaves reductions out (``no_sync``), and goes
on where some ranks run out of data (``join``).

Bytes on each rank, for P of parameters: P parameters, P gradients, P in buckets (none with
``gradient_as_bucket_view``), and all optimizer states. Sent a step: 2·P·(N−1)/N of gradients, and the buffers.

Left out, and refused by name: DDP's own mixed precision, delayed all-reduce of named parameters, batched copies,
skipping unused parameters. Left out altogether: hooks on buffers, built-in hooks in C++, fused optimizers, another
process group later, remote references, ``torch.compile`` across buckets.
Sources: arXiv:2006.15704, https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from .autograd_graph import map_tensors, tensors_in, through_sink
from .buckets import broadcast_together
from .ddp_checks import check_devices, check_layers, check_same_model, mistake_of_hook
from .ddp_logging import describe
from .join import Shadow
from .reducer import Reducer

MIB = 2**20
FIRST_BUCKET_BYTES = MIB
"""A smaller first bucket, so that the network has something to do soon; only with the default size."""
BUCKET_CAP_MB = 25


class DistributedDataParallel(nn.Module, Joinable):
    """A module whose gradients are averaged over ranks; the arguments are those of PyTorch's class of this name.

    Args:
        module: on one device, the same on all ranks.
        device_ids: that one device, to which inputs are moved; None on a CPU.
        broadcast_buffers: send rank 0's buffers before each forward.
        init_sync: compare shapes, and send rank 0's parameters, at construction.
        bucket_cap_mb: size of the buckets; None for 25 after a first one of 1.
        bucket_cap_mb_list: instead of it, those of the first, the second, … and of all others.
        find_unused_parameters: allow outputs, or losses, that do not depend on every parameter.
        gradient_as_bucket_view: let gradients lie in the buckets, instead of copies.
        static_graph: promise that which parameters are used, and how, never changes.
        forward_sync_buffers: what ``broadcast_buffers`` does, but for the construction, where it sends them always.
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
        super().__init__()
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
        self.process_group: Any = device_mesh.get_group() if device_mesh is not None else process_group
        self.process_group = self.process_group or dist.group.WORLD
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        params = [param for name, param in module.named_parameters() if name not in self.parameters_to_ignore]
        self.device_ids, self.output_device = check_devices(params, device_ids, output_device)
        self.device = params[0].device
        check_layers(module, self.device)
        self.module, self.dim = module, dim
        self.forward_sync_buffers = broadcast_buffers is not False
        sends_buffers_at_first = self.forward_sync_buffers
        if forward_sync_buffers is not None:
            self.forward_sync_buffers, sends_buffers_at_first = forward_sync_buffers, True
        self.find_unused_parameters, self.gradient_as_bucket_view = find_unused_parameters, gradient_as_bucket_view
        self.static_graph = static_graph
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._buffer_sizes = [FIRST_BUCKET_BYTES, BUCKET_CAP_MB * MIB]
        if bucket_cap_mb is not None:
            self._buffer_sizes = [int(bucket_cap_mb * MIB)]
        self.bucket_bytes_cap_list = [int(size * MIB) for size in bucket_cap_mb_list or ()]
        self._buffer_sizes = self.bucket_bytes_cap_list or self._buffer_sizes
        self.bucket_bytes_cap = max(self._buffer_sizes)
        if init_sync:
            check_same_model(params, self.process_group)
            self.send_states(0, sends_buffers_at_first)
        self._build_reducer()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module; where the backward is to reduce, prepare it."""
        reduces = torch.is_grad_enabled() and self.require_backward_grad_sync
        joining = Join.notify_join_context(self)
        if joining is not None:
            (active,) = joining.get_future().wait()
            self.reducer.divisor = self.reducer.world_size if self._divides_by_all else int(active.item())
        if torch.is_grad_enabled():
            self.reducer.begin_forward()
        if self.will_sync_module_buffers():
            self._send_buffers()
        if self._join_config.enable:
            self.any_rank_reduces(self.require_backward_grad_sync)
        if self.device_ids is not None:
            inputs, kwargs = map_tensors((inputs, kwargs), lambda tensor: tensor.to(self.device, non_blocking=True))
        with torch.profiler.record_function("DistributedDataParallel.forward"):
            output = self.module(*inputs, **kwargs)
        self.require_forward_param_sync = reduces
        if not reduces:
            return output
        self.reducer.expect_backward(tensors_in(output))
        if self.reducer.counts_first or (self.find_unused_parameters and not self.static_graph):
            output = through_sink(output, self.reducer.enter_backward)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up without reducing them; forwards within count, and the first backward after reduces."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a function do the collective of each bucket instead, once and before the first backward.

        Args:
            state: given to it each time.
            hook: called with the state and a bucket, whose gradients are not divided by anything; returns a future of
                the tensor that becomes the bucket's buffer.
        """
        mistake = mistake_of_hook(hook)
        if mistake is not None:
            self.reducer.fail(*mistake)
        if self.reducer.comm_hook is not None:
            message = "register_comm_hook or register_builtin_comm_hook can only be called once."
            self.reducer.fail(RuntimeError, message)
        self.reducer.comm_hook = (hook, state)

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Surround a loop that takes fewer steps on some ranks than on others; see PyTorch's ``Join``."""
        settings = {"divide_by_initial_world_size": divide_by_initial_world_size}
        return Join([self], enable, throw_on_early_termination, **settings)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank without data does in step with the others."""
        self._divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        return Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` counts ranks."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """Whose ranks it counts."""
        return self.process_group

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    def will_sync_module_buffers(self) -> bool:
        """Whether a forward sends buffers: not after one whose backward did not reduce."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.own_buffers())

    def _build_reducer(self) -> None:
        named = {param: name for name, param in self.module.named_parameters() if param.requires_grad}
        kept = [(name, param) for param, name in named.items() if name not in self.parameters_to_ignore]
        sparse = {
            module.weight
            for module in self.module.modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        }
        self.reducer = Reducer(
            [name for name, _ in kept],
            [param for _, param in kept],
            [param in sparse for _, param in kept],
            self.process_group,
            self._buffer_sizes,
            self.bucket_bytes_cap_list or (sys.maxsize,),
            find_unused=self.find_unused_parameters,
            as_views=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self.reducer.iterations:
            message = "set_static_graph() should be called before training loop starts, after the construction."
            self.reducer.fail(RuntimeError, message)
        self.static_graph = True
        self.reducer.set_static_graph(True)

    def own_buffers(self) -> list[Tensor]:
        """Buffers of the module that are not to be ignored."""
        return [buffer for name, buffer in self.module.named_buffers() if name not in self.parameters_to_ignore]

    def send_states(self, source: int, buffers: bool) -> None:
        """Overwrite parameters, and buffers too if asked, with those of one rank."""
        own = [param for name, param in self.module.named_parameters() if name not in self.parameters_to_ignore]
        broadcast_together([*own, *(self.own_buffers() if buffers else [])], source, self.process_group)

    def _send_buffers(self) -> None:
        """Rank 0's, or those of a rank that still has data."""
        source = self.common_rank(True) if self._join_config.enable else 0
        broadcast_together(self.own_buffers(), source, self.process_group)

    def common_rank(self, is_candidate: bool) -> int:
        """The last of the ranks that may send."""
        rank = torch.tensor([self.process_group.rank() if is_candidate else -1], device=self.device)
        dist.all_reduce(rank, op=dist.ReduceOp.MAX, group=self.process_group)
        return int(rank.item())

    def any_rank_reduces(self, reduces: bool) -> bool:
        """Whether the backward of any rank will reduce."""
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
        self.reducer.remove_hooks()

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
