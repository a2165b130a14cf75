"""The programs behind this project's first published table, rewritten for tracing.

Eight Ascend A2 NPUs trained Llama2-7B, batch 1, sequence 4096, with torch 2.7.1 and the first
program of this name (github.com/icerain-alt/FSDPToys). Today's trainer keeps less and offloads
differently, so its predictions cannot be compared with that table; traces of equivalent programs
can. Each fact that affects memory or time has a comment with the commit at which it was read:

- a2304c9: ``train_fsdp1.py``, ``train_fsdp2.py``, ``accelerate/offload.py``, the newest public
  versions found, with all switches of the table except the finer wrapping;
- e9bea04: ``run_fsdp.sh``: expandable segments, and tensors of collectives not recorded on their
  streams.

One difference: at a2304c9 the vocabulary has 100,000 tokens, which makes 7.3 billion parameters;
the table's 9.72 GiB are those of 32,000.

The table's two FSDP2 rows with finer wrapping and checkpointing were made with
``accelerate/fsdp2_patch.py`` (cbab1de). torch from 2.10 on has its fix.

The programs follow rank 0, which printed its numbers. They run on any device: a planned one, or a
CPU with tiny sizes (FSDP1's CPU offload and its broadcast need an accelerator).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.api import BackwardPrefetch
from torch.distributed.tensor import DTensor

from fsdptoys.patches.registry import AUTO, apply_patches
from scripts.planner.published_llama2 import ChunkedLoss, Llama2, Sizes

Fill = Callable[[Tensor], object]


class Marks(Protocol):
    """The interface of a recorder."""

    def mark(self, step: int, phase: str) -> None:
        """Start a phase."""


@dataclass(frozen=True)
class Switches:
    """One row of the table."""

    strategy: str
    """``fsdp1`` or ``fsdp2``."""
    parts: bool = False
    """Whether attention and feed-forward are units of their own."""
    checkpointing: bool = False
    chunk_loss: bool = False
    optimizer_offload: bool = False
    cpu_offload: bool = False


@dataclass(frozen=True)
class Published:
    """The table's numbers of a row."""

    seconds: float
    """Step time."""
    end_gib: float
    """Allocated at the end of a step, with its tensors still referenced."""
    reserved_gib: float


def _rows() -> dict[tuple[str, str], tuple[Switches, Published]]:
    switches: dict[str, dict[str, bool]] = {
        "block": {},
        "block gc": {"checkpointing": True},
        "block gc chunk": {"checkpointing": True, "chunk_loss": True},
        "block gc chunk oo": {
            "checkpointing": True,
            "chunk_loss": True,
            "optimizer_offload": True,
        },
        "block gc chunk co": {
            "checkpointing": True,
            "chunk_loss": True,
            "cpu_offload": True,
        },
        "parts gc chunk co": {
            "parts": True,
            "checkpointing": True,
            "chunk_loss": True,
            "cpu_offload": True,
        },
        "parts": {"parts": True},
        "parts gc": {"parts": True, "checkpointing": True},
    }
    seconds = {
        "fsdp1": (1.96, 2.30, 2.31, 3.09, 10.44, 10.38, 2.12, 2.78),
        "fsdp2": (1.90, 2.26, 2.27, 3.74, 10.31, 10.37, 2.02, 2.41),
    }
    end = (9.72, 9.72, 9.48, 3.20, 0.06, 0.06, 9.72, 9.72)
    reserved = {
        "fsdp1": (44.92, 21.90, 21.59, 20.20, 12.31, 9.36, 42.80, 19.85),
        "fsdp2": (40.78, 18.17, 17.78, 13.62, 8.44, 7.64, 40.36, 17.45),
    }
    return {
        (strategy, name): (Switches(strategy, **switches[name]), Published(*figures))
        for strategy in seconds
        for name, *figures in zip(
            switches, seconds[strategy], end, reserved[strategy], strict=True
        )
    }


ROWS = _rows()
"""(strategy, name) → switches and results. gc: checkpointing; oo and co: optimizer or full CPU
offload; parts: finer wrapping."""


def materialize(module: nn.Module, device: torch.device, fill: Fill | None) -> None:
    """Allocate a module's parameters and buffers in the order in which FSDP moves them to a
    device."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.is_meta:
                values = torch.empty_like(parameter, device=device)
                if fill is not None:
                    fill(values)
                setattr(owner, name, nn.Parameter(values))
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(owner, name, torch.zeros_like(buffer, device=device))


def shard_with_fsdp2(
    model: Llama2,
    mesh: DeviceMesh,
    device: torch.device,
    switches: Switches,
    fill: Fill | None,
) -> None:
    """Wrap each block, then the rest, and spread the values of rank 0 one parameter at a time
    (a2304c9)."""
    settings: dict[str, Any] = {
        # Two axes, one with a single rank: the path of hybrid sharding, with an all-reduce that
        # does nothing.
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
    }
    if switches.cpu_offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    for block in model.blocks():
        # The model was built on the host, and fully_shard moves the parameters that it shards.
        materialize(block, device, fill)
        if switches.parts:
            fully_shard(block.attention, **settings)
            fully_shard(block.feed_forward, **settings)
        fully_shard(block, **settings)
    materialize(model, device, fill)
    # Before torch 2.8 the root was never resharded; the head is read outside of it.
    fully_shard(model, reshard_after_forward=False, **settings)
    shards = [
        parameter.to_local().detach()
        for parameter in model.parameters()
        if isinstance(parameter, DTensor)
    ]
    # With CPU offload the whole sharded model went to the device for this, and back.
    shards = [shard.to(device) for shard in shards]
    for parameter, shard in zip(model.parameters(), shards, strict=True):
        whole = torch.zeros(parameter.shape, device=device)
        if fill is not None:
            fill(whole)
        dist.broadcast(whole, src=0)
        shard.copy_(whole.chunk(mesh["fsdp"].size())[mesh["fsdp"].get_local_rank()])
        del whole


def shard_with_fsdp1(
    model: Llama2,
    mesh: DeviceMesh,
    device: torch.device,
    switches: Switches,
    fill: Fill | None,
) -> nn.Module:
    """Wrap each block, then the rest (a2304c9)."""
    settings: dict[str, Any] = {
        "device_id": device,
        "device_mesh": mesh,
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "mixed_precision": MixedPrecision(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            buffer_dtype=torch.float32,
        ),
        "forward_prefetch": False,
        "limit_all_gathers": True,
        "use_orig_params": False,
        "sync_module_states": device.type != "cpu",
        "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
        "cpu_offload": CPUOffload(offload_params=switches.cpu_offload),
    }
    for index, block in enumerate(model.blocks()):
        if switches.parts:
            for name in ("attention", "feed_forward"):
                materialize(getattr(block, name), device, fill)
                setattr(
                    block,
                    name,
                    FullyShardedDataParallel(getattr(block, name), **settings),
                )
        materialize(block, device, fill)
        model.layers[index] = FullyShardedDataParallel(block, **settings)
    materialize(model, device, fill)
    return FullyShardedDataParallel(model, **settings)


def offload_states(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move all states at once, to the device before a step and to the host after it (a2304c9)."""

    def move(target: torch.device) -> None:
        with torch.no_grad():
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        state[name] = value.to(target, non_blocking=True)

    optimizer.register_step_pre_hook(lambda *_: move(device))
    optimizer.register_step_post_hook(lambda *_: move(torch.device("cpu")))


def first_program(
    switches: Switches,
    recorder: Marks,
    device: torch.device,
    sizes: Sizes | None = None,
    steps: int = 2,
    fill: Fill | None = None,
) -> list[float]:
    """Build the model of one row and train it for a few steps; return the losses.

    Args:
        switches: the row.
        recorder: receives the start of each phase.
        device: of the tensors; a process group for it exists.
        sizes: the published ones by default.
        steps: number of steps.
        fill: fills parameters; None on a planned device.
    """
    with apply_patches(AUTO, switches.strategy):
        return _train(switches, recorder, device, sizes or Sizes(), steps, fill)


def _train(
    switches: Switches,
    recorder: Marks,
    device: torch.device,
    sizes: Sizes,
    steps: int,
    fill: Fill | None,
) -> list[float]:
    recorder.mark(0, "construction")
    with torch.device("meta"):
        model = Llama2(sizes, switches.checkpointing)
    mesh = DeviceMesh(
        device.type, [list(range(dist.get_world_size()))], mesh_dim_names=("dp", "fsdp")
    )
    wrapped: nn.Module = model
    if switches.strategy == "fsdp1":
        wrapped = shard_with_fsdp1(model, mesh, device, switches, fill)
    else:
        shard_with_fsdp2(model, mesh, device, switches, fill)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-5, fused=True)
    if switches.optimizer_offload:
        offload_states(optimizer, device)
    losses = []
    # As there, a step's local tensors live until the next step reassigns their names.
    for step in range(1, steps + 1):
        recorder.mark(step, "data")
        tokens = torch.zeros(sizes.batch_size, sizes.seq_len, dtype=torch.int32).to(
            device
        )
        labels = (
            torch.zeros(sizes.batch_size, dtype=torch.int64)[:, None]
            .to(device)
            .repeat(1, sizes.seq_len)
        )
        recorder.mark(step, "forward")
        hidden = wrapped(tokens)
        if switches.chunk_loss:
            loss = ChunkedLoss.apply(
                hidden, model.head.weight, labels, sizes.chunk_tokens
            )
        else:
            logits = model.head(hidden)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        recorder.mark(step, "backward")
        loss.backward()
        recorder.mark(step, "optimizer")
        if isinstance(wrapped, FullyShardedDataParallel):
            wrapped.clip_grad_norm_(1.0)
        elif not switches.cpu_offload:
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        recorder.mark(step, "end")
    return losses
