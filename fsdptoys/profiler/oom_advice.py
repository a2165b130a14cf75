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

    shards_parameters: bool  # Whether the strategy shards parameters over ``mesh.fsdp_size`` ranks
    takes_cpu_offload: bool  # Whether the strategy can keep parameters in host memory
    world_size: int
    fsdp_size: int  # Ranks that share one copy of the parameters; 1 without sharding
    batch_size: int  # Sequences a micro-batch on each rank
    seq_len: int
    grad_accum: int
    dim: int  # Width of the hidden states
    n_layers: int
    vocab_size: int
    param_dtype: str  # dtype of forward and backward: ``float32``, ``bfloat16`` or ``float16``
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


def device_savings(
    live: LiveBytes, rest_bytes: int, phase: str, now: Switches, to_host: bool = True
) -> list[Saving]:
    """Switches to turn on for less device memory, the largest saving first.

    ``rest_bytes`` are other allocated bytes, activations in ``forward`` and ``backward`` only;
    ``to_host`` is whether the host has memory of its own, unlike on a CPU.
    """
    savings = []
    if phase in ("forward", "backward"):
        savings = [
            *_activation_savings(rest_bytes, now, to_host),
            *_gradient_savings(live, rest_bytes, now),
        ]
    states = live.states.device_bytes
    if phase == "optimizer":  # the allocation of states may have failed
        states = max(states, now.states_bytes)
    savings += (_offload_savings(live, states, now) if to_host else []) + _sharding_savings(
        live, states, now
    )
    return _largest_first(savings)


def host_savings(live: LiveBytes, now: Switches) -> list[Saving]:
    """Switches to turn off for less host memory, for a run on an accelerator."""
    states, kept = live.states.host_bytes, live.on_host().device_bytes
    savings = {
        "cpu_offload": Saving(
            "memory.cpu_offload=false", kept, "parameters, gradients and states go to the device"
        ),
        "optimizer_offload": Saving(
            "memory.optimizer_offload=false", states, "optimizer states go to the device"
        ),
        "activation_offload": Saving(
            "memory.activation_offload=false",
            _block_inputs(now),
            "inputs of the blocks go to the device",
        ),
    }
    return _largest_first([saving for switch, saving in savings.items() if getattr(now, switch)])


def _largest_first(savings: list[Saving]) -> list[Saving]:
    return sorted(
        (saving for saving in savings if saving.saved_bytes > 0),
        key=lambda saving: -saving.saved_bytes,
    )


def _activation_savings(rest_bytes: int, now: Switches, to_host: bool) -> list[Saving]:
    savings, inputs_bytes = [], _block_inputs(now)
    tokens = f"{now.batch_size}x{now.seq_len} tokens"
    if not now.chunk_loss:
        saved = now.batch_size * now.seq_len * now.vocab_size * LOGITS_BYTES
        why = f"{tokens} x {now.vocab_size} logits x {LOGITS_BYTES} bytes, less a chunk"
        savings.append(Saving("memory.chunk_loss=true", saved, why))
    if now.gradient_checkpointing == "none":
        why = "the rest without the block inputs, which it keeps"
        savings.append(Saving("memory.gradient_checkpointing=full", rest_bytes - inputs_bytes, why))
    elif to_host and not now.activation_offload:
        why = f"{tokens} x {now.dim} wide x {now.n_layers} blocks x {_bytes(now.param_dtype)} bytes"
        savings.append(Saving("memory.activation_offload=true", inputs_bytes, why))
    if now.batch_size > 1:
        # The largest proper divisor keeps the global batch.
        fewer = next(
            size for size in range(now.batch_size // 2, 0, -1) if now.batch_size % size == 0
        )
        switch = (
            f"train.batch_size={fewer} train.grad_accum={now.grad_accum * now.batch_size // fewer}"
        )
        saved = round(rest_bytes * (1 - fewer / now.batch_size))
        savings.append(Saving(switch, saved, "that share of the rest"))
    if now.param_dtype == "float32":
        savings.append(
            Saving(
                "parallel.param_dtype=bfloat16",
                rest_bytes // 2,
                "half of the rest, except the logits",
            )
        )
    return savings


def _gradient_savings(live: LiveBytes, rest_bytes: int, now: Switches) -> list[Saving]:
    if not now.sums_whole_gradients:
        return []
    shard = live.parameters.device_bytes + live.parameters.host_bytes
    saved = min(rest_bytes, shard * (now.fsdp_size - 1))
    why = f"gradients of all parameters between {now.grad_accum} micro-batches, less a shard"
    return [Saving("parallel.reduce_each_microbatch=true", saved, why)]


def _offload_savings(live: LiveBytes, states: int, now: Switches) -> list[Saving]:
    if now.cpu_offload:
        return []
    savings = []
    if not now.optimizer_offload:
        savings.append(Saving("memory.optimizer_offload=true", states, "the optimizer states"))
    if now.takes_cpu_offload:
        switch = (
            "memory.cpu_offload=true" + " memory.optimizer_offload=false" * now.optimizer_offload
        )
        saved = live.parameters.device_bytes + live.gradients.device_bytes + states
        savings.append(Saving(switch, saved, "parameters, gradients and optimizer states"))
    return savings


def _sharding_savings(live: LiveBytes, states: int, now: Switches) -> list[Saving]:
    if now.fsdp_size >= now.world_size:
        return []
    share = 1 - now.fsdp_size / now.world_size
    saved = round((live.parameters.device_bytes + live.gradients.device_bytes + states) * share)
    switch = "mesh.fsdp_size=-1" if now.shards_parameters else "parallel=fsdp2 mesh.fsdp_size=-1"
    why = f"{share:.0%} of parameters, gradients and states, when {now.world_size} ranks share them"
    return [Saving(switch, saved, why)]


def _block_inputs(now: Switches) -> int:
    """Bytes of all blocks' inputs, which checkpointing keeps."""
    return now.batch_size * now.seq_len * now.dim * now.n_layers * _bytes(now.param_dtype)


def _bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2
