"""The numbers of one optimizer step, with their units in their names, and how the rates among them are made.

MFU is model FLOP/s over the device's peak (arXiv:2204.02311, appendix B): it counts the arithmetic that the model
needs, not what gradient checkpointing does again, nor positions whose label does not count.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, get_args

from fsdptoys.device import GIB, Device, highest_resident_set_bytes, resident_set_bytes
from fsdptoys.utils.foreign import parse_json


@dataclass(frozen=True)
class RoutingMetrics:
    """How the routers of one step shared the work out, over all ranks and micro-batches."""

    aux_loss: float
    """Load-balancing loss without its coefficient: the number of experts a token is sent to, if balanced."""
    z_loss: float
    """Mean of logsumexp², without its coefficient."""
    entropy: float
    """Of the share of tokens of each expert, over that of equal shares: 1 is balanced; a mean over the layers."""
    max_load: float
    """Tokens of the busiest expert over the mean of its layer; the largest of any layer."""
    min_load: float
    """Tokens of the idlest expert over the mean of its layer; the smallest of any layer."""
    counts: list[list[int]]
    """Tokens sent to each expert, a row for each layer with experts."""


ROUTING_KEYS = {
    "aux_loss": "router_aux_loss",
    "z_loss": "router_z_loss",
    "entropy": "router_entropy",
    "max_load": "expert_load_max",
    "min_load": "expert_load_min",
}
"""Number of the routing → its key in ``metrics.jsonl``."""


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step. "Global" is over all ranks; the rest of what is measured is rank 0's."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Mean over the global batch's valid tokens, in nats, before the step's update."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    learning_rate: float
    """What the update used."""
    step_time_seconds: float
    """From the start of the step to the end of its update."""
    valid_tokens: int
    """Global labels that counted in the loss."""
    tokens_per_second: float
    """Global: ``valid_tokens / step_time_seconds``."""
    tflops_per_second_per_rank: float
    """Model FLOPs of the valid tokens over time and ranks, in 1e12/s."""
    mfu: float | None
    """Share of the device's peak FLOP/s; None where the peak is not known."""
    memory_allocated_gib: float | None
    """Device memory in tensors after the step; None on a CPU, as the next two."""
    memory_peak_gib: float | None
    """Highest ``memory_allocated_gib`` since the device's peak was last reset."""
    memory_reserved_gib: float | None
    """Device memory that the allocator holds."""
    resident_set_gib: float | None
    """Host memory of the process after the step; None where the system does not tell."""
    resident_set_peak_gib: float | None = None
    """Highest of the process so far, at any moment; None where the system does not tell."""
    eval_loss: float | None = None
    """Loss on the held-out part after the update, in nats a token; None where there was no evaluation."""
    routing: RoutingMetrics | None = None
    """How the routers shared the work out; None for a model without experts."""
    skipped: bool = False
    """Whether there was no update, since the loss or the gradient was not finite."""
    skipped_steps: int = 0
    """Steps without update so far in the run, this one included."""
    loss_spike: float | None = None
    """Robust standard deviations over the median of the losses before; None where that is no spike."""
    data_wait_seconds: float | None = None
    """Of the step's time, what rank 0 waited for its batches; None in lines of earlier versions."""

    def to_json(self) -> str:
        """One line of strict JSON; what is not a number becomes null and is named under ``non_finite``.

        Of the routing it has the numbers of the whole step; tokens of each expert are a table of their own.
        """
        values = self._values()
        non_finite = [name for name, value in values.items() if value is not None and not math.isfinite(value)]
        values.update(dict.fromkeys(non_finite))
        if non_finite:
            values["non_finite"] = non_finite
        return json.dumps(values, allow_nan=False)

    def numbers(self) -> dict[str, float]:
        """The same numbers under the same names, as they are; without those that were not measured."""
        return {name: float(value) for name, value in self._values().items() if value is not None}

    def _values(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        routing = values.pop("routing")
        if routing is not None:
            values |= {key: getattr(routing, name) for name, key in ROUTING_KEYS.items()}
        return values

    @classmethod
    def from_json(cls, line: str) -> "StepMetrics":
        """Read a line that ``to_json`` wrote, in this version or another.

        What is named as not finite is read as nan, keys of later versions are left out, and those that earlier
        versions did not have take their defaults. The tokens of each expert are not in the line.

        Raises:
            ValueError: if a key is missing, or a value is not of its kind or not one that a step can have.
        """
        values = parse_json(line)
        if not isinstance(values, dict) or not isinstance(values.get("non_finite", []), list):
            raise ValueError("a step is an object, and non_finite a list")
        values |= dict.fromkeys(map(str, values.get("non_finite", [])), math.nan)
        routing = None
        if any(key in values for key in ROUTING_KEYS.values()):
            parts = {name: _checked(values, key, float) for name, key in ROUTING_KEYS.items()}
            routing = RoutingMetrics(**parts, counts=[])
        known = {
            field.name: _checked(values, field.name, field.type)
            for field in dataclasses.fields(cls)
            if field.name != "routing" and (field.name in values or field.default is dataclasses.MISSING)
        }
        # What follows divides by it, and finds no time of 0 s in a run.
        if not known["step_time_seconds"] > 0:
            raise ValueError(f"step_time_seconds is {known['step_time_seconds']}")
        return cls(**known, routing=routing)

    def without_counts(self) -> "StepMetrics":
        """The same without the tokens of each expert, which are too many to keep of every step."""
        if self.routing is None:
            return self
        return dataclasses.replace(self, routing=dataclasses.replace(self.routing, counts=[]))


def step_metrics(
    *,
    step: int,
    loss: float,
    grad_norm: float,
    learning_rate: float,
    step_time_seconds: float,
    valid_tokens: int,
    flops_per_token: float,
    world_size: int,
    device: Device,
    peak_flops: float | None,
    eval_loss: float | None = None,
    routing: RoutingMetrics | None = None,
    skipped: bool = False,
    skipped_steps: int = 0,
    loss_spike: float | None = None,
    data_wait_seconds: float | None = None,
) -> StepMetrics:
    """Compute a step's rates and read the memory of this process.

    Args:
        step: number of the step, from 1.
        loss: mean over the global batch's valid tokens, in nats.
        grad_norm: norm of the gradient before clipping.
        learning_rate: what the update used.
        step_time_seconds: wall time of the step.
        valid_tokens: labels over all ranks that counted in the loss.
        flops_per_token: the model's FLOPs a token, forward and backward.
        world_size: ranks that shared the work.
        device: whose memory is read.
        peak_flops: peak FLOP/s of one device in the number format of the run; None where it is not known.
        eval_loss: nats a token on the held-out part, if it was evaluated after this step.
        routing: of a model with experts.
        skipped: whether there was no update.
        skipped_steps: steps without update so far in the run.
        loss_spike: score of a loss that stands out.
        data_wait_seconds: what this rank waited for its batches.
    """
    assert step_time_seconds > 0
    flops_per_second_per_rank = flops_per_token * valid_tokens / step_time_seconds / world_size
    memory = device.memory() if device.is_accelerator else None
    highest = highest_resident_set_bytes()
    return StepMetrics(
        step=step,
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        step_time_seconds=step_time_seconds,
        valid_tokens=valid_tokens,
        tokens_per_second=valid_tokens / step_time_seconds,
        tflops_per_second_per_rank=flops_per_second_per_rank / 1e12,
        mfu=flops_per_second_per_rank / peak_flops if peak_flops else None,
        memory_allocated_gib=memory.allocated_bytes / GIB if memory else None,
        memory_peak_gib=memory.peak_bytes / GIB if memory else None,
        memory_reserved_gib=memory.reserved_bytes / GIB if memory else None,
        resident_set_gib=resident_set_bytes() / GIB or None,
        resident_set_peak_gib=highest / GIB if highest is not None else None,
        eval_loss=eval_loss,
        routing=routing,
        skipped=skipped,
        skipped_steps=skipped_steps,
        loss_spike=loss_spike,
        data_wait_seconds=data_wait_seconds,
    )


def _checked(values: dict[str, Any], name: str, kind: Any) -> Any:
    """A value that is there, of the kind that its field's annotation allows, and in the range of that kind."""
    kinds = get_args(kind) or (kind,)
    if name not in values:
        raise ValueError(f"{name} is missing")
    if type(values[name]) not in kinds and not (float in kinds and type(values[name]) is int):
        raise ValueError(f"{name} is {values[name]!r}")
    value = values[name]
    if float in kinds and type(value) in (int, float) and math.isinf(value):
        raise ValueError(f"{name} is {value}")  # JSON's 1e999
    if float not in kinds and type(value) is int and not 0 <= value < 2**63:
        raise ValueError(f"{name} is {value}")
    return value
