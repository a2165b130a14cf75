"""DDP's logging data: settings, buckets, and how much of the communication the backward hides.

    forward_start      backward_start       comm_start      backward_end     comm_end
          │  forward_compute  │                  │  overlap        │              │
          ├───────────────────┼──────────── backward_compute ──────┤              │
                                                 ├──────── backward_comm ─────────┤

Times are nanoseconds of the host, measured in the first ten steps and in every hundredth after them. On a GPU they are
the times of kernel launches.
"""

import os
import time
from collections import Counter
from typing import Any

from torch import nn

from .core import Bucket
from .unused_parameters import PartialReducer

FIRST_STEPS = 10
"""Number of steps at the begin, all timed."""
DTYPE_NAMES = {"float16": "half", "float32": "float", "float64": "double"}
"""PyTorch's names in this log."""


class Logbook:
    """Times of the steps of one rank."""

    def __init__(self) -> None:
        self.sample_rate = 100
        """Later steps are timed if this divides their number."""
        self.times: dict[str, int] = {}
        """Of the last timed step, and averages."""
        self._moments: dict[str, int] = {}
        self._sums: Counter[str] = Counter()
        self._steps = 0

    def note(self, moment: str) -> None:
        """Record the first time of a moment in this step."""
        self._moments.setdefault(moment, time.time_ns())

    def begin(self, iterations: int) -> None:
        """Begin a step and evaluate the one before, which was number ``iterations``."""
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


class LoggedReducer(PartialReducer):
    """A reducer that records times and bucket sizes."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.logbook = Logbook()
        self.first_sizes: list[int] = []
        """Bytes of the buckets before they are rebuilt."""
        super().__init__(*args, **settings)

    def set_buckets(self, buckets: list[Bucket]) -> None:
        """Record the sizes of the first step."""
        super().set_buckets(buckets)
        if not self.has_rebuilt:
            self.first_sizes = [_nbytes(bucket) for bucket in buckets]

    def begin_forward(self) -> None:
        """Begin a step."""
        self.logbook.begin(self.iterations)
        super().begin_forward()

    def start_backward(self) -> None:
        """Record the time."""
        self.logbook.note("backward_start")
        super().start_backward()

    def all_reduce(self, index: int) -> None:
        """Record the time of the first bucket."""
        self.logbook.note("comm_start")
        super().all_reduce(index)

    def end_backward(self) -> None:
        """Record the times."""
        self.logbook.note("backward_end")
        super().end_backward()
        self.logbook.note("comm_end")


def describe(ddp: Any) -> dict[str, Any]:
    """Return the logging data of a ``DistributedDataParallel`` under PyTorch's names, as strings and integers."""
    reducer = ddp.reducer
    backend = ddp.process_group.name()
    variables = ["CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG"]
    if backend == "gloo":
        variables += ["GLOO_DEVICE_TRANSPORT", "GLOO_SOCKET_IFNAME"]
    dtypes = {str(param.dtype).removeprefix("torch.") for param in reducer.params}
    data: dict[str, Any] = {
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
        "dtypes": ", ".join(sorted(DTYPE_NAMES.get(name, name) for name in dtypes)),
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
        options = getattr(ddp.process_group._get_backend(ddp.device), "options", None)
        data["gloo_num_threads"] = getattr(options, "_threads", 2)  # no public API; 2 is PyTorch's default
    if reducer.has_rebuilt:
        data["has_rebuilt_buckets"] = 1
        data["rebuilt_bucket_sizes"] = ", ".join(str(_nbytes(bucket)) for bucket in reducer.buckets)
        data["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(map(str, bucket.numbers)) for bucket in reducer.buckets
        )
    if reducer.ready_order:
        data["prev_iteration_grad_ready_order_indices"] = ", ".join(map(str, reducer.ready_order))
    if reducer.comm_hook is not None:
        hook = reducer.comm_hook[0]
        data["comm_hook"] = getattr(hook, "__qualname__", type(hook).__name__)
    if reducer.error:
        data.update(has_error=1, error=reducer.error)
    return data


def _nbytes(bucket: Bucket) -> int:
    return sum(param.nbytes for param in bucket.params)
