"""Estimate how much memory each switch would save, from a run's own numbers.

Estimates are upper bounds: "the rest" of the device memory (no parameters, gradients or optimizer
states) is mostly activations, but also gathered parameters and temporaries. Savings of two switches
overlap and must not be added.
"""

from dataclasses import dataclass

from .live_bytes import LiveBytes

# Peak bytes of a logit in the unchunked loss, measured with bf16 and float32 parameters
LOGITS_BYTES = 12


@dataclass(frozen=True)
class Switches:
    """Memory settings of a run, and the sizes that they act on."""

    # Whether the strategy shards parameters over ``mesh.fsdp_size`` ranks
    shards_parameters: bool
    takes_cpu_offload: bool  # Whether the strategy can keep parameters in host memory
    world_size: int
    fsdp_size: int  # Ranks that share one copy of the parameters; 1 without sharding
    batch_size: int  # Sequences a micro-batch on each rank
    seq_len: int
    grad_accum: int
    dim: int  # Width of the hidden states
    n_layers: int
    vocab_size: int
    # dtype of forward and backward: ``float32``, ``bfloat16`` or ``float16``
    param_dtype: str
    chunk_loss: bool = False
    gradient_checkpointing: str = "none"  # ``none``, ``full`` or ``selective``
    activation_offload: bool = False
    optimizer_offload: bool = False
    cpu_offload: bool = False
    sums_whole_gradients: bool = False
    """Whether sharded gradients can be, and are not, reduced before the last micro-batch."""
    states_bytes: int = 0
    """Bytes of all optimizer states on this rank's device; the first optimizer step allocates
    them."""


@dataclass(frozen=True)
class Saving:
    """Saving of one switch on this rank's device."""

    switch: str  # As typed on the command line
    saved_bytes: int
    why: str  # Source of the number


Candidate = tuple[bool, str, int, str]
"""Whether a switch is worth a line, and the fields of its ``Saving``."""


def device_savings(
    live: LiveBytes, rest_bytes: int, phase: str, now: Switches, to_host: bool = True
) -> list[Saving]:
    """Switches to turn on for less device memory, the largest saving first.

    ``rest_bytes`` are other allocated bytes, activations in ``forward`` and ``backward`` only;
    ``to_host`` is whether the host has memory of its own, unlike on a CPU.
    """
    computes = phase in ("forward", "backward")
    keeps_activations = now.gradient_checkpointing == "none"
    offloads = to_host and not now.cpu_offload
    states = live.states.device_bytes
    if phase == "optimizer":  # the allocation of states may have failed
        states = max(states, now.states_bytes)
    shards = live.parameters.device_bytes + live.gradients.device_bytes + states
    whole_gradients = (live.parameters.device_bytes + live.parameters.host_bytes) * (
        now.fsdp_size - 1
    )
    inputs_bytes = _block_inputs(now)
    tokens = f"{now.batch_size}x{now.seq_len} tokens"
    # The largest proper divisor keeps the global batch.
    divisors = (
        size for size in range(now.batch_size // 2, 0, -1) if now.batch_size % size == 0
    )
    fewer = next(divisors, 1)
    unshared = 1 - now.fsdp_size / now.world_size
    return _largest_first(
        [
            (
                computes and not now.chunk_loss,
                "memory.chunk_loss=true",
                now.batch_size * now.seq_len * now.vocab_size * LOGITS_BYTES,
                f"{tokens} x {now.vocab_size} logits x {LOGITS_BYTES} bytes, less a chunk",
            ),
            (
                computes and keeps_activations,
                "memory.gradient_checkpointing=full",
                rest_bytes - inputs_bytes,
                "the rest without the block inputs, which it keeps",
            ),
            (
                computes
                and not keeps_activations
                and to_host
                and not now.activation_offload,
                "memory.activation_offload=true",
                inputs_bytes,
                f"{tokens} x {now.dim} wide x {now.n_layers} blocks x {_bytes(now.param_dtype)} "
                "bytes",
            ),
            (
                computes and now.batch_size > 1,
                f"train.batch_size={fewer} "
                f"train.grad_accum={now.grad_accum * now.batch_size // fewer}",
                round(rest_bytes * (1 - fewer / now.batch_size)),
                "that share of the rest",
            ),
            (
                computes and now.param_dtype == "float32",
                "parallel.param_dtype=bfloat16",
                rest_bytes // 2,
                "half of the rest, except the logits",
            ),
            (
                computes and now.sums_whole_gradients,
                "parallel.reduce_each_microbatch=true",
                min(rest_bytes, whole_gradients),
                f"gradients of all parameters between {now.grad_accum} micro-batches, less a shard",
            ),
            (
                offloads and not now.optimizer_offload,
                "memory.optimizer_offload=true",
                states,
                "the optimizer states",
            ),
            (
                offloads and now.takes_cpu_offload,
                "memory.cpu_offload=true"
                + " memory.optimizer_offload=false" * now.optimizer_offload,
                shards,
                "parameters, gradients and optimizer states",
            ),
            (
                now.fsdp_size < now.world_size,
                "parallel=fsdp2 " * (not now.shards_parameters) + "mesh.fsdp_size=-1",
                round(shards * unshared),
                f"{unshared:.0%} of parameters, gradients and states, when {now.world_size} ranks "
                "share them",
            ),
        ]
    )


def host_savings(live: LiveBytes, now: Switches) -> list[Saving]:
    """Switches to turn off for less host memory, for a run on an accelerator."""
    return _largest_first(
        [
            (
                now.cpu_offload,
                "memory.cpu_offload=false",
                live.on_host().device_bytes,
                "parameters, gradients and states go to the device",
            ),
            (
                now.optimizer_offload,
                "memory.optimizer_offload=false",
                live.states.host_bytes,
                "optimizer states go to the device",
            ),
            (
                now.activation_offload,
                "memory.activation_offload=false",
                _block_inputs(now),
                "inputs of the blocks go to the device",
            ),
        ]
    )


def _largest_first(candidates: list[Candidate]) -> list[Saving]:
    savings = [
        Saving(switch, saved, why)
        for applies, switch, saved, why in candidates
        if applies and saved > 0
    ]
    return sorted(savings, key=lambda saving: -saving.saved_bytes)


def _block_inputs(now: Switches) -> int:
    """Bytes of all blocks' inputs, which checkpointing keeps."""
    return (
        now.batch_size * now.seq_len * now.dim * now.n_layers * _bytes(now.param_dtype)
    )


def _bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2
