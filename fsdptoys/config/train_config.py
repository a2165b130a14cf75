"""Settings of the training loop."""

from dataclasses import dataclass

from fsdptoys.parallel.determinism import Deterministic
from fsdptoys.parallel.float8 import Float8
from fsdptoys.parallel.precision import SumDType
from fsdptoys.register import registered
from fsdptoys.utils.bounds import MOST_STEPS, MOST_TOKENS, above, at_least, between
from fsdptoys.utils.named_items import check_names
from fsdptoys.utils.options import Effect, Stage, check_options, option

# Upper bound of a batch's sequences, and of the batches of a step or an evaluation
MOST_BATCHES = 2**20
MOST_SEED = 2**63 - 1
MOST_SLICES = 2**10


@dataclass
class TrainConfig:
    """The training loop."""

    batch_size: int = option(
        1,
        at_least(1, MOST_BATCHES),
        effect=Effect.rounding,
        alias=(
            "per_device_train_batch_size train_batch_size micro_batch_size mbs bs batch "
            "local_batch_size"
        ),
    )
    """Sequences per micro-batch on each rank."""
    seq_len: int = option(
        -1,
        at_least(1, MOST_TOKENS, other=-1),
        effect=Effect.training,
        alias="sequence_length seq_length block_size max_seq_length max_length context_length",
    )
    """Tokens per sequence; -1 for the model's maximum, at most 4096."""
    steps: int = option(
        -1,
        at_least(1, MOST_STEPS, other=-1),
        effect=Effect.training,
        acts=Stage.update,
        alias=(
            "max_steps num_steps train_steps max_iters iters total_steps max_train_steps "
            "num_train_steps"
        ),
    )
    """Number of optimizer steps; -1 for 10, or for one pass over the data if a model is tuned."""
    grad_accum: int = option(
        1,
        at_least(1, MOST_BATCHES),
        effect=Effect.rounding,
        alias=(
            "gradient_accumulation_steps accumulate_grad_batches grad_accum_steps "
            "accumulation_steps"
        ),
    )
    """Micro-batches per optimizer step; their gradients are summed."""
    max_grad_norm: float | None = option(
        1.0,
        above(0),
        effect=Effect.training,
        acts=Stage.update,
        alias="gradient_clipping grad_clip clip_grad clip_grad_norm max_norm gradient_clip_val",
    )
    """Clip the gradient norm to this value; null only measures it."""
    max_seconds: float | None = option(None, above(0), effect=Effect.none)
    """Stop after the step in which the loop reaches this time, on an accelerator maybe later; null
    for no limit.

    Schedules follow ``steps`` only.
    """
    eval_every: int = option(
        -1,
        at_least(0, MOST_STEPS, other=-1),
        effect=Effect.none,
        alias="eval_steps eval_interval evaluation_interval",
    )
    """Evaluate held-out data every N steps and at the end; 0: never; -1: never, or 4 times when
    tuning."""
    eval_batches: int = option(8, at_least(1, MOST_BATCHES), effect=Effect.none)
    """Micro-batches per evaluation on each rank."""
    label_smoothing: float = option(
        0.0, between(0, 1, below=True), effect=Effect.training
    )
    """Share of each label spread evenly over the vocabulary; not used in evaluation."""
    z_loss_coef: float = option(0.0, at_least(0, 1e6), effect=Effect.training)
    """Weight of logsumexp(logits)², which keeps logits from drifting; not used in evaluation."""
    skip_nonfinite: bool = option(True, effect=Effect.training, acts=Stage.update)
    """Skip the update on all ranks if the loss or any gradient is not finite."""
    max_skipped: int = option(20, at_least(1, MOST_STEPS), effect=Effect.none)
    """Save a checkpoint and stop after this many skipped updates in total."""
    max_skipped_in_a_row: int = option(5, at_least(1, MOST_STEPS), effect=Effect.none)
    """Save a checkpoint and stop after this many consecutive skipped updates."""
    gc_every: int = option(10, at_least(0, MOST_STEPS), effect=Effect.none)
    """Collect Python's garbage every N steps, between steps and on all ranks at once; 0 for
    Python's own times."""
    compile: bool = option(
        False, effect=Effect.rounding, alias="torch_compile use_compile"
    )
    """Compile each block with ``torch.compile``."""
    float8: Float8 = option(Float8.none, effect=Effect.format, alias="fp8 float8")
    """float8 matmuls in the blocks' linear layers, with one scale per tensor (tensorwise) or per
    row (rowwise)."""
    float8_all_gather: bool = option(False, effect=Effect.format, needs="train.float8")
    """FSDP2 gathers the weights of float8 layers in float8 (tensorwise only)."""
    deterministic: Deterministic = option(Deterministic.false, effect=Effect.rounding)
    """The same bits in every repetition, on any layout of 1, 2, 4, 8, … ranks (true), or on any
    layout at all."""
    grains: int = option(
        8,
        at_least(1, MOST_TOKENS),
        effect=Effect.rounding,
        needs="train.deterministic=layout",
    )
    """``deterministic=layout``: pieces of each sequence, computed by themselves; divides
    ``seq_len``."""
    slices: int = option(
        1,
        at_least(1, MOST_SLICES),
        effect=Effect.rounding,
        needs="train.deterministic=layout",
    )
    """``deterministic=layout``: slices of features, added in float64, for ``mesh.tp_size``, which
    divides it."""
    sum_dtype: SumDType = option(SumDType.auto, effect=Effect.rounding)
    """dtype of sums of gradient norms and losses over ranks; auto: float64, on NPUs float32."""
    callbacks: list[str] = option([], effect=Effect.training)
    """Callbacks of own code, called in this order; their options are ``callbacks.NAME.KEY``."""
    seed: int = option(0, at_least(0, MOST_SEED), effect=Effect.none)
    """Seed for every purpose without a seed of its own."""
    init_seed: int | None = option(None, at_least(0, MOST_SEED), effect=Effect.training)
    """Seed of initial weights; null for ``seed``."""
    data_seed: int | None = option(None, at_least(0, MOST_SEED), effect=Effect.training)
    """Seed of data order and synthetic data; null for ``seed``."""
    sample_seed: int | None = option(None, at_least(0, MOST_SEED), effect=Effect.none)
    """Seed of text generation; null for ``seed``."""

    def __post_init__(self) -> None:
        check_options("train", self)
        check_names("train.callbacks", self.callbacks, registered("callbacks"))
        self.deterministic = Deterministic(self.deterministic)

    @property
    def grain_tokens(self) -> int | None:
        """Tokens of a grain; None where nothing is computed by grains."""
        return (
            self.seq_len // self.grains if self.deterministic.covers_layouts else None
        )

    def resolve(self) -> None:
        """Set missing seeds to ``seed``."""
        for name in ("init_seed", "data_seed", "sample_seed"):
            if getattr(self, name) is None:
                setattr(self, name, self.seed)
