"""What DDP tells of itself: its settings, its buckets, and how much of the communication the backward hid.

    forward_start      backward_start       comm_start      backward_end     comm_end
          │  forward_compute  │                  │  overlap        │              │
          ├───────────────────┼──────────── backward_compute ──────┤              │
                                                 ├──────── backward_comm ─────────┤

Times are of the host, in nanoseconds, taken in the first ten steps and then in every hundredth. On a GPU they say when
work was given to it, not when it was done.
"""

import os
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

FIRST_STEPS = 10
"""All of which are timed."""
NAMES = {"float16": "half", "float32": "float", "float64": "double"}
"""Number formats by the names that PyTorch's logging has for them."""


class Logbook:
    """Times of the steps of one rank."""

    def __init__(self) -> None:
        self.sample_rate = 100
        """Every so many steps are timed."""
        self.times: dict[str, int] = {}
        """Of the last step that was, and averages."""
        self._moments: dict[str, int] = {}
        self._sums: Counter[str] = Counter()
        self._steps = 0

    def note(self, moment: str) -> None:
        """Remember when something happened, the first time in this step."""
        self._moments.setdefault(moment, time.time_ns())

    def begin(self, iterations: int) -> None:
        """Begin a step: take down the one before.

        Args:
            iterations: that were begun before this one.
        """
        moments, self._moments = self._moments, {}
        self.note("forward_start")
        if len(moments) < 5 or not (iterations <= FIRST_STEPS or iterations % self.sample_rate == 0):
            return
        spans = {
            "forward_compute_time": moments["backward_start"] - moments["forward_start"],
            "backward_compute_time": moments["backward_end"] - moments["backward_start"],
            "backward_comm_time": moments["comm_end"] - moments["comm_start"],
            "backward_compute_comm_overlap_time": max(0, moments["backward_end"] - moments["comm_start"]),
        }
        self._sums.update(spans)
        self._steps += 1
        self.times = {
            "iteration": iterations,
            **spans,
            **{f"avg_{name}": total // self._steps for name, total in self._sums.items()},
            "forward_compute_time_start": moments["forward_start"],
            "backward_compute_time_start": moments["backward_start"],
            "backward_compute_time_end": moments["backward_end"],
            "backward_comm_time_start": moments["comm_start"],
            "backward_comm_time_end": moments["comm_end"],
        }


def describe(ddp: Any) -> dict[str, Any]:
    """What PyTorch's logging data have: settings, buckets and times; strings and integers.

    Args:
        ddp: the wrapped module.
    """
    reducer = ddp.reducer
    backend = ddp.process_group.name()
    variables = ["CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG"]
    if backend == "gloo":
        variables += ["GLOO_DEVICE_TRANSPORT", "GLOO_SOCKET_IFNAME"]
    told: dict[str, Any] = {
        "world_size": reducer.world_size,
        "rank": ddp.process_group.rank(),
        "backend_name": backend,
        "module_name": type(ddp.module).__name__,
        "device_ids": ", ".join(map(str, ddp.device_ids or [])),
        "output_device": -1 if ddp.output_device is None else ddp.output_device.index,
        "broadcast_buffers": int(ddp.broadcast_buffers),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "is_multi_device_module": 0,
        "has_sync_bn": int(any(isinstance(module, nn.SyncBatchNorm) for module in ddp.module.modules())),
        "dtypes": ", ".join(sorted({_name_dtype(param) for param in reducer.params})),
        "num_parameter_tensors": len(reducer.params),
        "total_parameter_size_bytes": sum(param.nbytes for param in reducer.params),
        "bucket_sizes": ", ".join(map(str, reducer.first_sizes)),
        "iteration": 0,
        "num_buckets_reduced": len(reducer.buckets),
        "unused_parameter_size": sum(reducer.params[number].nbytes for number in reducer.unused),
        **{name.lower(): os.environ.get(name, "N/A") for name in variables},
        **reducer.logbook.times,
    }
    if backend == "gloo":
        told["gloo_num_threads"] = _gloo_threads(ddp.process_group, ddp.device)
    if reducer.has_rebuilt:
        told["has_rebuilt_buckets"] = 1
        told["rebuilt_bucket_sizes"] = ", ".join(str(bucket.nbytes) for bucket in reducer.buckets)
        told["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(map(str, bucket.numbers)) for bucket in reducer.buckets
        )
    if reducer.ready_order:
        told["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, reducer.ready_order))
    if reducer.comm_hook is not None:
        hook = reducer.comm_hook[0]
        told["comm_hook"] = getattr(hook, "__qualname__", type(hook).__name__)
    if reducer.error:
        told.update(has_error=1, error=reducer.error)
    return told


def _gloo_threads(group: dist.ProcessGroup, device: torch.device) -> int:
    """PyTorch tells of gloo's threads by private names alone; its default where it does not."""
    options = getattr(group._get_backend(device), "options", None)
    threads: int = getattr(options, "_threads", 2)
    return threads


def _name_dtype(param: nn.Parameter) -> str:
    name = str(param.dtype).removeprefix("torch.")
    return NAMES.get(name, name)
