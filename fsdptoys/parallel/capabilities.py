"""What a strategy can do: its mesh axes and the switches that it supports.

Each strategy's config declares its row as ``capabilities``. A field declared with :func:`refuses`
names settings. A strategy without it refuses them in the sentence beside them
(``config/rules/strategies.py``); ``{KEY}`` in a sentence stands for ``KEY=`` and its value. The
planner, sweeps and reports read the same fields, so nothing outside this package compares a
strategy's name.

``scripts/write_pairs.py`` writes the rows of all strategies as a table into ``docs/strategies.md``.
Limits that depend on a strategy's own options are in its ``validate``.
"""

import dataclasses
from typing import Any, NamedTuple

import torch

from .context import ContextForm

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
FORMS = (ContextForm.ulysses, ContextForm.gathered, ContextForm.ring)
MIXES_DTYPES = TORCH >= (2, 11)
"""Whether an FSDP2 unit may have frozen parameters of another dtype; versions from 2.8 to 2.10 are
not tried."""


def refuses(settings: str, sentence: str, default: bool = False) -> Any:
    """Declare a capability by the settings, separated by spaces, that a strategy without it
    refuses."""
    return dataclasses.field(
        default=default, metadata={"refuses": (settings, sentence)}
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Facts about a strategy, and the mesh axes and switches that it has."""

    single_process: bool = False
    """One process trains alone."""
    shards_parameters: bool = False
    """Each of ``mesh.fsdp_size`` ranks has a shard of every parameter, and gathers it where
    needed."""
    owns_parameters: bool = False
    """Each parameter is on one of all ranks, which broadcasts it where needed."""
    flattens_parameters: bool = False
    """A unit is one module whose parameters are concatenated into a flat one."""
    uses_dtensor: bool = False
    """Parameters are DTensors, sharded one by one."""

    context_forms: tuple[ContextForm, ...] = ()
    """Forms of ``mesh.cp_size``, none without it; the second needs no number of heads."""
    splits_experts: bool = False
    """``mesh.ep_size``."""
    splits_features: bool = False
    """``mesh.tp_size``."""
    splits_layers: bool = False
    """``mesh.pp_size``."""

    cpu_offload: bool = refuses(
        "memory.cpu_offload=true",
        "memory.cpu_offload=true is not an option of {parallel}; set parallel=fsdp2 or "
        "memory.cpu_offload=false",
    )
    overlapped_cpu_offload: bool = refuses(
        "memory.cpu_offload_executor=overlapped",
        "memory.cpu_offload_executor=overlapped is not an option of {parallel}; set "
        "parallel=fsdp2 or memory.cpu_offload_executor=native",
    )
    optimizer_offload: bool = refuses(
        "memory.optimizer_offload=true",
        "memory.optimizer_offload=true is not an option of {parallel}, whose states are cut; set "
        "parallel=fsdp2 or leave it out",
    )
    """Optimizer states can be moved by the parameters that they belong to."""
    lazy_updates: bool = refuses(
        "memory.offload_schedule=lazy",
        "memory.offload_schedule=lazy is not an option of {parallel}; set "
        "memory.offload_schedule=pipelined or parallel=fsdp2",
    )
    """Parameters may be updated as late as the next forward, unit by unit."""
    optimizer_in_backward: bool = refuses(
        "memory.optimizer_in_backward=true",
        "memory.optimizer_in_backward=true frees gradients as they come, and {parallel} keeps "
        "them until the backward ends; set parallel=fsdp2 or memory.optimizer_in_backward=false",
    )
    float8: bool = refuses(
        "train.float8",
        "{train.float8} is not an option of {parallel}, whose flat parameters torchao does not "
        "know; set parallel=fsdp2",
    )
    float8_all_gather: bool = refuses(
        "train.float8_all_gather=true",
        "train.float8_all_gather=true casts shards of FSDP2, which {parallel} does not have; set "
        "parallel=fsdp2 or train.float8_all_gather=false",
    )
    deterministic: bool = refuses(
        "train.deterministic=true",
        "train.deterministic=true adds up gradients in float64, which {parallel} does not; set "
        "parallel=fsdp2 or train.deterministic=false",
    )
    layout_mode: bool = refuses(
        "train.deterministic=layout",
        "{parallel} does not sum gradients in float64 once a step, which "
        "train.deterministic=layout rules out; set parallel=fsdp2",
    )
    muon: bool = refuses(
        "optim.exchanges_matrices=true",
        "{optim} orthogonalizes full matrices, and {parallel} does not shard between rows; set "
        "parallel=fsdp2 or optim=adamw",
    )
    low_bit_states: bool = refuses(
        "optim.low_bit_format!=null",
        "{optim.state_dtype} keeps a scale for each part of a row, and {parallel} does not shard "
        "between rows; set parallel=fsdp2 or optim.state_dtype=bfloat16",
    )
    mixed_dtypes: bool = refuses(
        "tune.base=nf4",
        "tune.base=nf4 packs weights into bytes, which {parallel} would cast like other weights "
        f"with torch {torch.__version__}; set parallel={'fsdp2' if MIXES_DTYPES else 'ddp'} or "
        "tune.base=plain",
    )
    """Frozen parameters may have another dtype than trained ones: packed bytes, or
    ``param_dtype``."""
    compiled_context: bool = refuses(
        "train.compile=true mesh.cp_size",
        "train.compile=true would compile the exchanges of {parallel} with {mesh.cp_size}; set "
        "train.compile=false",
        default=True,
    )
    compiled_experts: bool = refuses(
        "train.compile=true mesh.ep_size",
        "train.compile=true would compile the exchanges of {parallel} with {mesh.ep_size}; set "
        "train.compile=false",
        default=True,
    )
    ring_kernels: bool = refuses(
        "parallel.context=ring kernels.attention!=torch",
        "{kernels.attention} is not an option of {parallel} parallel.context=ring, which has "
        "causal attention of its own; set parallel.context=ulysses",
        default=True,
    )


class Refusal(NamedTuple):
    """A capability, the settings that need it, and the sentence without it."""

    capability: str
    settings: tuple[str, ...]
    sentence: str


REFUSALS = [
    Refusal(
        field.name,
        tuple(field.metadata["refuses"][0].split()),
        field.metadata["refuses"][1],
    )
    for field in dataclasses.fields(Capabilities)
    if field.metadata
]
