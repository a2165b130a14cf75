"""Metrics of one optimizer step, with units in their names, and their JSON form.

MFU is model FLOP/s over the device's peak (arXiv:2204.02311, appendix B). It counts the model's own
FLOPs, without recomputation by activation checkpointing and without positions of ignored labels.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, get_args

from fsdptoys.device import (
    GIB,
    REST,
    Device,
    highest_resident_set_bytes,
    resident_set_bytes,
)
from fsdptoys.utils.foreign import parse_json


class NonFinite(float, Enum):
    """A number that JSON lacks; ``value`` is its name."""

    nan = "nan"
    inf = "inf"
    negative_inf = "-inf"

    def __new__(cls, name: str) -> "NonFinite":
        """Construct the float of that name."""
        member = float.__new__(cls, name)
        member._value_ = name
        return member


Number = float | NonFinite
"""Annotation for ``from_tree.build``, which accepts finite floats only."""


@dataclass(frozen=True)
class RoutingMetrics:
    """Expert routing of one step, over all ranks and micro-batches."""

    aux_loss: Number
    """Load-balancing loss without its coefficient; equals the number of experts per token if
    balanced."""
    z_loss: Number
    """Mean of logsumexp(router logits)², without its coefficient."""
    entropy: Number
    """Entropy of the experts' shares of tokens over that of equal shares (1 is balanced); mean over
    the layers."""
    max_load: Number
    """Tokens of the busiest expert over its layer's mean; maximum over the layers."""
    min_load: Number
    """Tokens of the idlest expert over its layer's mean; minimum over the layers."""
    counts: list[list[int]] = field(default_factory=list)
    """Tokens sent to each expert, [MoE layers][experts]."""


ROUTING_KEYS = {
    "aux_loss": "router_aux_loss",
    "z_loss": "router_z_loss",
    "entropy": "router_entropy",
    "max_load": "expert_load_max",
    "min_load": "expert_load_min",
}
"""Field of ``RoutingMetrics`` → key in ``metrics.jsonl``."""


ADDED_PREFIX = "callbacks."
"""Before the names of numbers that callbacks add to a step."""


PURPOSE_KEYS = {
    "parameters": "memory_parameters_gib",
    "gradients": "memory_gradients_gib",
    "optimizer_states": "memory_optimizer_gib",
    REST: "memory_rest_gib",
}
"""Purpose of memory on a CPU → key in ``metrics.jsonl``."""


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step. "Global" means over all ranks; other measurements are of rank
    0."""

    step: int
    """Step number, from 1."""
    loss: float
    """Mean over the global batch's valid tokens, in nats, before the optimizer step."""
    grad_norm: float
    """Global gradient norm before clipping."""
    learning_rate: float
    """Learning rate of this optimizer step."""
    step_time_seconds: float
    """Time from the start of the step to the end of the optimizer step: by a CPU's clock, or by the
    device's events."""
    valid_tokens: int
    """Global number of labels in the loss."""
    tokens_per_second: float
    """Global: valid tokens, with ``data=chat`` all tokens but padding, divided by
    ``step_time_seconds``."""
    tflops_per_second_per_rank: float
    """Model FLOPs of these tokens per second and rank, in 1e12/s."""
    mfu: float | None
    """Fraction of the device's peak FLOP/s; None if the peak is unknown."""
    memory_allocated_gib: float | None
    """Device memory in tensors after the step; on a CPU after ``memory_counted_step``."""
    memory_peak_gib: float | None
    """Highest ``memory_allocated_gib`` since the device's peak was last reset; on a CPU within the
    counted steps."""
    memory_reserved_gib: float | None
    """Device memory reserved by the allocator; None on a CPU."""
    resident_set_gib: float | None
    """Host memory of the process after the step; None if the system does not report it."""
    resident_set_peak_gib: float | None = None
    """Peak host memory of the process so far; None if the system does not report it."""
    eval_loss: float | None = None
    """Loss on the held-out part after the optimizer step, in nats per token; None without an
    evaluation."""
    routing: RoutingMetrics | None = None
    """Expert routing; None for a model without experts."""
    skipped: bool = False
    """Whether the optimizer step was skipped because of a non-finite loss or gradient."""
    skipped_steps: int = 0
    """Skipped steps of the run so far, including this one."""
    loss_scale: float | None = None
    """Factor of float16's loss scaling in this step; missing in lines of runs in other dtypes."""
    loss_spike: float | None = None
    """Robust standard deviations above the median of earlier losses; None if the loss is no
    spike."""
    data_wait_seconds: float | None = None
    """Time that rank 0's host waited for its batches, in seconds; 0 if an accelerator still
    computed at its end.

    None in lines of earlier versions.
    """
    memory_parameters_gib: float | None = None
    """Part of ``memory_peak_gib`` in parameters; this and the next five are None on an
    accelerator."""
    memory_gradients_gib: float | None = None
    """Part of ``memory_peak_gib`` in gradients that the optimizer receives."""
    memory_optimizer_gib: float | None = None
    """Part of ``memory_peak_gib`` in optimizer states."""
    memory_rest_gib: float | None = None
    """The rest of ``memory_peak_gib``: activations, gathered parameters, buffers, temporaries."""
    memory_host_gib: float | None = None
    """Held by offloading in the host's place after ``memory_counted_step``; not part of the
    others."""
    memory_counted_step: int | None = None
    """The step in which a CPU's memory was last counted."""
    eval_own_loss: float | None = None
    """A user's loss on the held-out part, per token; missing in lines of runs without one."""
    added: dict[str, float] = field(default_factory=dict)
    """Numbers that callbacks add, ``callbacks.NAME.KEY``."""

    def to_json(self) -> str:
        """One line of strict JSON; non-finite values become null and are listed under
        ``non_finite``.

        Of the routing it has the aggregates only; token counts per expert go to ``routing.jsonl``.
        """
        values = self.values()
        non_finite = [
            name
            for name, value in values.items()
            if value is not None and not math.isfinite(value)
        ]
        values.update(dict.fromkeys(non_finite))
        if non_finite:
            values["non_finite"] = non_finite
        return json.dumps(values, allow_nan=False)

    def numbers(self) -> dict[str, float]:
        """The measured numbers under the names of ``to_json``; non-finite values stay."""
        return {
            name: float(value)
            for name, value in self.values().items()
            if value is not None
        }

    def values(self) -> dict[str, Any]:
        """The numbers under the names of ``to_json``; None where nothing was measured."""
        values = {
            metric.name: getattr(self, metric.name)
            for metric in dataclasses.fields(self)
        }
        routing = values.pop("routing")
        added = values.pop("added")
        for name in ("loss_scale", "eval_own_loss"):
            if values[name] is None:
                del values[name]
        if routing is not None:
            values |= {
                key: getattr(routing, name) for name, key in ROUTING_KEYS.items()
            }
        return values | added

    @classmethod
    def from_json(cls, line: str) -> "StepMetrics":
        """Parse a line written by ``to_json``, in this version or another.

        Non-finite values are read as nan, unknown keys are ignored, and optional keys may be
        missing. ``counts`` of the routing are empty. ValueError for a missing key, or a value of
        the wrong type or out of range.
        """
        values = parse_json(line)
        if not isinstance(values, dict) or not isinstance(
            values.get("non_finite", []), list
        ):
            raise ValueError("a step is an object, and non_finite a list")
        values |= dict.fromkeys(map(str, values.get("non_finite", [])), math.nan)
        routing = None
        if any(key in values for key in ROUTING_KEYS.values()):
            parts = {
                name: _checked(values, key, float) for name, key in ROUTING_KEYS.items()
            }
            routing = RoutingMetrics(**parts)
        numbers = {
            metric.name: _checked(values, metric.name, metric.type)
            for metric in dataclasses.fields(cls)
            if metric.name not in ("routing", "added")
            and (metric.name in values or metric.default is dataclasses.MISSING)
        }
        # Rates divide by it.
        if not numbers["step_time_seconds"] > 0:
            raise ValueError(f"step_time_seconds is {numbers['step_time_seconds']}")
        added = {
            key: _checked(values, key, float)
            for key in values
            if key.startswith(ADDED_PREFIX)
        }
        return cls(**numbers, routing=routing, added=added)

    def without_counts(self) -> "StepMetrics":
        """A copy without token counts per expert, which are too large to keep for every step."""
        if self.routing is None:
            return self
        return dataclasses.replace(
            self, routing=dataclasses.replace(self.routing, counts=[])
        )


def step_rates(
    *,
    step_time_seconds: float,
    valid_tokens: int,
    tokens: int,
    flops_per_token: float,
    world_size: int,
    peak_flops: float | None,
) -> dict[str, Any]:
    """Compute a step's rates; return these fields of ``StepMetrics``.

    Args:
        step_time_seconds: a field of ``StepMetrics``, like ``valid_tokens``.
        valid_tokens: over all ``world_size`` ranks.
        tokens: over all ranks; more than ``valid_tokens`` where only answers have labels.
        flops_per_token: model FLOPs of forward and backward per token.
        peak_flops: peak FLOP/s of one device in the dtype of the run; None if unknown.
    """
    assert step_time_seconds > 0
    flops_per_second_per_rank = (
        flops_per_token * tokens / step_time_seconds / world_size
    )
    return {
        "step_time_seconds": step_time_seconds,
        "valid_tokens": valid_tokens,
        "tokens_per_second": tokens / step_time_seconds,
        "tflops_per_second_per_rank": flops_per_second_per_rank / 1e12,
        "mfu": flops_per_second_per_rank / peak_flops if peak_flops else None,
    }


def measure_memory(device: Device) -> dict[str, Any]:
    """Read the memory of the device and of this process now; return these fields of
    ``StepMetrics``."""
    memory = device.memory()
    at_peak = memory.at_peak if memory and memory.at_peak is not None else None
    highest = highest_resident_set_bytes()
    return {
        "memory_allocated_gib": memory.allocated_bytes / GIB if memory else None,
        "memory_peak_gib": memory.peak_bytes / GIB if memory else None,
        "memory_reserved_gib": _to_gib(memory.reserved_bytes if memory else None),
        **{
            key: _to_gib(at_peak.get(purpose, 0) if at_peak else None)
            for purpose, key in PURPOSE_KEYS.items()
        },
        "memory_host_gib": _to_gib(memory.host_bytes if memory else None),
        "resident_set_gib": resident_set_bytes() / GIB or None,
        "resident_set_peak_gib": highest / GIB if highest is not None else None,
    }


def _to_gib(size: int | None) -> float | None:
    return None if size is None else size / GIB


def _checked(values: dict[str, Any], name: str, kind: Any) -> Any:
    """A value of the type and range of its field's annotation."""
    kinds = get_args(kind) or (kind,)
    if name not in values:
        raise ValueError(f"{name} is missing")
    value = values[name]
    valid = type(value) in kinds or (float in kinds and type(value) is int)
    if valid and type(value) in (int, float):
        # JSON's 1e999 is infinite
        valid = not math.isinf(value) if float in kinds else 0 <= value < 2**63
    if not valid:
        raise ValueError(f"{name} is {value!r}")
    return value
