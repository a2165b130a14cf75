"""Length, batch, evaluation, checkpoints and restarts of a run."""

from fsdptoys.config.sections import Sections

from .rule import Rules, Where

SIZES = Rules()
"""Against the model."""
CONTINUATION = Rules()
"""Of checkpoints."""


@SIZES.rule()
def positions_reach(config: Sections, where: Where) -> str | None:
    """Sequences are at most as long as the model's positions."""
    longest = config.model.max_seq_len
    if config.train.seq_len <= longest:
        return None
    return (
        f"train.seq_len={config.train.seq_len} is over the model's model.max_seq_len={longest}; "
        f"set train.seq_len={longest}"
    )


@SIZES.rule()
def batches_fit_the_host(config: Sections, where: Where) -> str | None:
    """Batches of a step are in host memory."""
    train = config.train
    if config.step_bytes <= 2**50:
        return None
    return (
        f"train.batch_size={train.batch_size}, train.grad_accum={train.grad_accum} and "
        f"train.seq_len={train.seq_len} make a step's batches {config.step_bytes / 2**50:,.0f} "
        "PiB; lower them"
    )


@SIZES.rule("memory.gradient_checkpointing")
def some_block_is_checkpointed(config: Sections, where: Where) -> str | None:
    """Checkpointing starts at a block of the model."""
    start, n_layers = config.memory.checkpointing_start_index, config.model.n_layers
    if start < n_layers:
        return None
    return (
        f"memory.checkpointing_start_index={start} is past the last of the model's {n_layers} "
        "layers; set memory.checkpointing_start_index=0 to checkpoint every block"
    )


@SIZES.rule("memory.activation_offload=true")
def activations_leave_the_device(config: Sections, where: Where) -> str | None:
    """The last block's tensors stay on the device, and those of the block before until they are
    used."""
    memory = config.memory
    checkpointed = len(
        range(memory.checkpointing_start_index, config.model.n_layers, memory.checkpointing_every)
    )
    if checkpointed >= 3:
        return None
    return (
        "memory.activation_offload=true saves nothing with fewer than 3 checkpointed blocks, of "
        f"which there are {checkpointed}; set memory.activation_offload=false"
    )


CONTINUATION.exclude(
    "checkpoint.resume",
    "checkpoint.folder=null",
    "metrics.run_dir=null",
    when=lambda config, where: config.checkpoint.resume in ("auto", "must"),
    says="{checkpoint.resume} looks for checkpoints in the run directory, which is a new one each "
    "time; set metrics.run_dir=runs/NAME",
)
CONTINUATION.exclude(
    "launch.max_restarts",
    "checkpoint.every=0",
    says="{launch.max_restarts} would start from step 1 each time without checkpoints; set "
    "checkpoint.every=100",
)
