"""The out-of-memory report: live bytes by category, and the saving of each switch.

Numbers come from the allocator's message, since tensors are freed while the exception propagates,
or from the device if the message lacks them. Formats are those of torch 2.7.1 and 2.13 (CUDA and
CPU) and torch_npu 2.13.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fsdptoys.device import KINDS, Device, highest_resident_set_bytes
from fsdptoys.utils.causes import with_causes
from fsdptoys.utils.tables import align_columns
from fsdptoys.utils.text import UNITS, size_text

from .live_bytes import LiveBytes
from .oom_advice import Switches, device_savings, host_savings

HOST_TEXTS = [text for kind in KINDS.values() for text in kind.host_memory_errors]
DEVICE_TEXTS = [text for kind in KINDS.values() for text in kind.device_memory_errors]
REST = "the rest: activations, temporaries, gathered parameters"


class ExplainedOutOfMemoryError(RuntimeError):
    """Memory ran out; the message is ``out_of_memory_report``."""


@dataclass(frozen=True)
class OOMContext:
    """Phase of the run, and its live bytes."""

    step: int  # From 1; meaningless in the construction
    phase: str
    """``construction``, with the expected bytes as ``live``, or ``forward``, ``backward``,
    ``optimizer``, …."""
    rank: int
    live: LiveBytes
    switches: Switches


@dataclass(frozen=True)
class Failure:
    """A failed allocation; None for unknown numbers."""

    on_host: bool  # Whether host memory ran out, as always on a CPU
    asked_bytes: int | None
    total_bytes: int | None  # Of the device, or of the node
    # In tensors at the failure; for host memory the largest resident set of this process
    allocated_bytes: int | None
    reserved_bytes: int | None  # By the device's allocator at the failure


@contextlib.contextmanager
def explain_out_of_memory(
    device: Device, context: Callable[[], OOMContext]
) -> Iterator[None]:
    """Turn a failed allocation into an ``ExplainedOutOfMemoryError``; other errors pass."""
    try:
        yield
    except (
        RuntimeError,
        MemoryError,
    ) as error:
        # torch.OutOfMemoryError is the first, NumPy's the second
        cause = _out_of_memory(error)
        if cause is None or isinstance(error, ExplainedOutOfMemoryError):
            raise
        # of an inner phase, wrapped since
        if isinstance(cause, ExplainedOutOfMemoryError):
            raise cause from error
        report = out_of_memory_report(
            read_failure(error, device), context(), device.type
        )
        raise ExplainedOutOfMemoryError(report) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one behind it, means that device or host memory ran out."""
    return _out_of_memory(error) is not None


def _out_of_memory(error: BaseException) -> BaseException | None:
    """The error of the allocator."""
    for cause in with_causes(error):
        if isinstance(
            cause, (torch.OutOfMemoryError, ExplainedOutOfMemoryError, MemoryError)
        ):
            return cause
        if isinstance(cause, RuntimeError) and any(
            text in str(cause) for text in HOST_TEXTS + DEVICE_TEXTS
        ):
            return cause
    return None


def read_failure(error: BaseException, device: Device) -> Failure:
    """Read the numbers from an allocator's message, or else from the device."""
    error = _out_of_memory(error) or error
    message = str(error)
    requested_bytes = _find_size(message, r"(?:ried to|Unable to) allocate:?\s*SIZE")
    on_host = isinstance(error, MemoryError) or any(
        text in message for text in HOST_TEXTS
    )
    if on_host or not device.is_accelerator:
        return Failure(
            True,
            requested_bytes,
            Device("cpu").total_memory_bytes,
            highest_resident_set_bytes(),
            None,
        )
    now = device.memory()
    assert now is not None
    # CUDA: "77.21 GiB is allocated by PyTorch[, with … in private pools], and 120.45 MiB is
    # reserved by PyTorch but unallocated". NPU: "60.97 GiB total capacity; 30.00 GiB already
    # allocated; …; 31.00 GiB reserved in total".
    allocated = _find_size(
        message, "SIZE (?:is allocated by PyTorch|already allocated)"
    )
    reserved = _find_size(message, "SIZE reserved in total")
    unallocated = _find_size(message, "SIZE is reserved by PyTorch but unallocated")
    if reserved is None and allocated is not None and unallocated is not None:
        reserved = allocated + unallocated
    return Failure(
        on_host=False,
        asked_bytes=requested_bytes,
        total_bytes=device.total_memory_bytes,
        allocated_bytes=now.allocated_bytes if allocated is None else allocated,
        reserved_bytes=now.reserved_bytes if reserved is None else reserved,
    )


def out_of_memory_report(
    failure: Failure, context: OOMContext, device_type: str
) -> str:
    """Live bytes, and the switches that reduce them."""
    live = context.live
    switches = context.switches
    on_cpu = device_type == "cpu"
    tensors = live.on_host() if failure.on_host else live
    rest_bytes = max(0, (failure.allocated_bytes or 0) - tensors.device_bytes)
    rows = [
        (tensors.parameters.device_bytes, "parameters"),
        (tensors.gradients.device_bytes, "gradients"),
        (tensors.states.device_bytes, "optimizer states"),
        (rest_bytes, REST + (", Python and its libraries" if failure.on_host else "")),
    ]
    constructing = context.phase == "construction"
    if constructing:
        rows = [(tensors.parameters.device_bytes, "parameters, when complete")]
    memory = "host memory" if failure.on_host else "the device memory"
    lines = [
        *_headline(failure, context, device_type),
        f"{'planned' if constructing else 'live'} in {memory} of this rank:",
        *(
            f"  {row}"
            for row in align_columns([(size_text(count), name) for count, name in rows])
        ),
    ]
    if context.phase != "optimizer" and switches.states_bytes > (
        live.states.device_bytes or tensors.states.device_bytes
    ):
        lines.append(
            f"  the first optimizer step will add {size_text(switches.states_bytes)} of states"
        )
    if failure.on_host and not on_cpu:
        savings = host_savings(live, switches)
    else:
        savings = device_savings(
            tensors, rest_bytes, context.phase, switches, to_host=not on_cpu
        )
    if savings:
        lines.append("maximum saving of each switch alone:")
        cells = [
            (size_text(saving.saved_bytes), saving.switch, saving.why)
            for saving in savings
        ]
        lines += [f"  {row}" for row in align_columns(cells)]
    else:
        lines.append(
            "no other switch saves memory; use a smaller model, shorter sequences or more ranks"
        )
    return "\n".join(lines)


def _headline(failure: Failure, context: OOMContext, device_type: str) -> list[str]:
    where = (
        "host memory" if failure.on_host else f"the memory of the {device_type} device"
    )
    numbers = {
        "asked for": failure.asked_bytes,
        "in all": failure.total_bytes,
        "resident in this process at most"
        if failure.on_host
        else "allocated": failure.allocated_bytes,
        "reserved": failure.reserved_bytes,
    }
    sizes = [
        f"{size_text(count)} {name}"
        for name, count in numbers.items()
        if count is not None
    ]
    when = (
        "construction"
        if context.phase == "construction"
        else f"{context.phase} of step {context.step}"
    )
    return [
        f"{where} ran out on rank {context.rank} in the {when}",
        *([", ".join(sizes)] if sizes else []),
    ]


def _find_size(text: str, pattern: str) -> int | None:
    """Bytes of the size that SIZE in a pattern matches."""
    match = re.search(
        pattern.replace("SIZE", r"(\d+(?:\.\d+)?)\s*(bytes|[KMGTPE]iB)"), text
    )
    return round(float(match[1]) * UNITS[match[2]]) if match else None
