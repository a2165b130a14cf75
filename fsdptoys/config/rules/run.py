"""Length, batch, evaluation, checkpoints and restarts of a run."""

from fsdptoys.config.sections import Sections

from .rule import Rules

SIZES = Rules()
"""Against the model."""
CONTINUATION = Rules()
"""Of checkpoints."""


def _checkpointed(config: Sections) -> range:
    """Return the indices of the blocks that are checkpointed."""
    memory = config.memory
    return range(
        memory.checkpointing_start_index,
        config.model.n_layers,
        memory.checkpointing_every,
    )


SIZES.exclude(
    when=lambda config, where: config.train.seq_len > config.model.max_seq_len,
    says="{train.seq_len} is over the model's {model.max_seq_len}; set "
    "train.seq_len={=model.max_seq_len}",
)
SIZES.exclude(
    when=lambda config, where: config.step_bytes > 2**50,
    says="{train.batch_size}, {train.grad_accum} and {train.seq_len} make a step's batches larger "
    "than a PiB; lower them",
)
SIZES.exclude(
    "memory.gradient_checkpointing",
    when=lambda config, where: (
        config.memory.checkpointing_start_index >= config.model.n_layers
    ),
    says="{memory.checkpointing_start_index} is past the last of {model.n_layers} layers; set "
    "memory.checkpointing_start_index=0 to checkpoint every block",
)
# The last block's tensors stay on the device, and those of the block before until they are used.
SIZES.exclude(
    "memory.activation_offload=true",
    when=lambda config, where: len(_checkpointed(config)) < 3,
    says="memory.activation_offload=true saves nothing with fewer than 3 checkpointed blocks; set "
    "memory.activation_offload=false",
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
