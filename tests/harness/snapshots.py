"""A caching allocator's history, made by hand in the form of ``torch.cuda.memory._snapshot()``.

Device 1 has a segment of 64 MiB: 8 MiB of weights from before the history, then 24 MiB of logits
and 2 MiB of a norm in the forward, of which the logits are freed in the backward, then the weights,
then 1 MiB is allocated in place of the logits, and a request for 40 MiB fails.
"""

from typing import Any

from fsdptoys.metrics.results import ProfileResult
from fsdptoys.metrics.summary import profile_markdown
from fsdptoys.profiler import Profiler
from fsdptoys.utils.from_tree import build

MIB = 2**20
BASE = 0x7F0000000000

INNER = {"filename": "/venv/lib/torch/nn/functional.py", "line": 100, "name": "linear"}
LOSS = {
    "filename": "/src/fsdptoys/memory/loss.py",
    "line": 17,
    "name": "cross_entropy_sum",
}
NORM = {"filename": "/src/models/norm.py", "line": 9, "name": "forward"}
MAIN = {"filename": "/src/fsdptoys/trainer.py", "line": 180, "name": "_train_step"}
BACKWARD = {
    "filename": "/venv/lib/torch/autograd/graph.py",
    "line": 829,
    "name": "<run_backward>",
}


def event(action: str, addr: int, mib: int, *frames: dict[str, Any]) -> dict[str, Any]:
    return {
        "action": action,
        "addr": addr,
        "size": mib * MIB,
        "stream": 0,
        "time_us": 0,
        "frames": list(frames),
    }


def block(
    address: int, mib: int, *frames: dict[str, Any], unused: int = 0
) -> dict[str, Any]:
    """A block that is live if it has frames."""
    state = "active_allocated" if frames else "inactive"
    requested = mib * MIB - unused if frames else 0
    return {
        "address": address, "size": mib * MIB, "requested_size": requested,
        "state": state, "frames": list(frames),
    }  # fmt: skip


def make_snapshot() -> dict[str, Any]:
    weights = BASE
    logits = BASE + 8 * MIB
    norm = BASE + 32 * MIB
    failure = event("oom", 0, 40, INNER, LOSS, MAIN) | {"device_free": MIB}
    failure.pop("addr")
    trace = [
        event("segment_alloc", BASE, 64, LOSS, MAIN),
        event("alloc", logits, 24, INNER, LOSS, MAIN),
        event("alloc", norm, 2, NORM, MAIN),
        event("free_requested", logits, 24, BACKWARD),
        event("free_completed", logits, 24, BACKWARD),
        event("free_requested", weights, 8, BACKWARD),
        event("free_completed", weights, 8, BACKWARD),
        event("alloc", logits + 8 * MIB, 1, MAIN),
        failure,
        event("snapshot", 0, 0),
    ]
    blocks = [
        block(BASE, 16),
        block(BASE + 16 * MIB, 1, MAIN),
        block(BASE + 17 * MIB, 15),
        block(norm, 2, NORM, MAIN, unused=512),
        block(norm + 2 * MIB, 30),
    ]
    segment = {
        "device": 1,
        "address": BASE,
        "total_size": 64 * MIB,
        "allocated_size": 3 * MIB,
        "stream": 0,
    }
    segment |= {
        "active_size": 3 * MIB,
        "requested_size": 3 * MIB - 512,
        "segment_type": "large",
    }
    segment |= {
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [LOSS, MAIN],
        "blocks": blocks,
    }
    return {"segments": [segment], "device_traces": [[], trace]}


def summary_of(profiler: Profiler) -> str | None:
    """The part of a run's summary on the profiler's findings."""
    findings = profiler.findings()
    return (
        None if findings is None else profile_markdown(build(ProfileResult, findings))
    )
