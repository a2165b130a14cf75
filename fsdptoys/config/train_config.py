"""Settings of the training loop."""

from dataclasses import dataclass, field

from fsdptoys.parallel.determinism import Deterministic
from fsdptoys.parallel.float8 import Float8
from fsdptoys.parallel.precision import SumDType
from fsdptoys.utils.bounds import MOST_STEPS, MOST_TOKENS, above, at_least, between, check_bounds

MOST_BATCHES = 2**20  # upper bound of a batch's sequences, and of the batches of a step or an evaluation
MOST_SEED = 2**63 - 1
MOST_SLICES = 2**10


@dataclass
class TrainConfig:
    """The training loop."""

    batch_size: int = field(default=1, metadata=at_least(1, MOST_BATCHES))
    """Sequences per micro-batch on each rank."""
    seq_len: int = field(default=-1, metadata=at_least(1, MOST_TOKENS, other=-1))
    """Tokens per sequence; -1 for the model's maximum, at most 4096."""
    steps: int = field(default=-1, metadata=at_least(1, MOST_STEPS, other=-1))
    """Number of optimizer steps; -1 for 10, or for one pass over the data if a model is tuned."""
    grad_accum: int = field(default=1, metadata=at_least(1, MOST_BATCHES))
    """Micro-batches per optimizer step; their gradients are summed."""
    max_grad_norm: float | None = field(default=1.0, metadata=above(0))
    """Clip the gradient norm to this value; null only measures it."""
    max_seconds: float | None = field(default=None, metadata=above(0))
    """Stop after the step in which the loop reaches this time, on an accelerator maybe later; null for no limit.

    Schedules follow ``steps`` only.
    """
    eval_every: int = field(default=-1, metadata=at_least(0, MOST_STEPS, other=-1))
    """Evaluate held-out data every N steps and at the end; 0: never; -1: never, or 4 times when tuning."""
    eval_batches: int = field(default=8, metadata=at_least(1, MOST_BATCHES))
    """Micro-batches per evaluation on each rank."""
    label_smoothing: float = field(default=0.0, metadata=between(0, 1, below=True))
    """Share of each label spread evenly over the vocabulary; not used in evaluation."""
    z_loss_coef: float = field(default=0.0, metadata=at_least(0, 1e6))
    """Weight of logsumexp(logits)², which keeps logits from drifting; not used in evaluation."""
    skip_nonfinite: bool = True
    """Skip the update on all ranks if the loss or any gradient is not finite."""
    max_skipped: int = field(default=20, metadata=at_least(1, MOST_STEPS))
    """Save a checkpoint and stop after this many skipped updates in total."""
    max_skipped_in_a_row: int = field(default=5, metadata=at_least(1, MOST_STEPS))
    """Save a checkpoint and stop after this many consecutive skipped updates."""
    gc_every: int = field(default=10, metadata=at_least(0, MOST_STEPS))
    """Collect Python's garbage every N steps, between steps and on all ranks at once; 0 for Python's own times."""
    compile: bool = False
    """Compile each block with ``torch.compile``."""
    float8: Float8 = Float8.none
    """float8 matmuls in the blocks' linear layers, with one scale per tensor (tensorwise) or per row (rowwise)."""
    float8_all_gather: bool = False
    """FSDP2 gathers the weights of float8 layers in float8 (tensorwise only)."""
    deterministic: Deterministic = Deterministic.false
    """The same bits in every repetition, on any layout of 1, 2, 4, 8, … ranks (true), or on any layout at all."""
    grains: int = field(default=8, metadata=at_least(1, MOST_TOKENS))
    """``deterministic=layout``: pieces of each sequence, computed by themselves; divides ``seq_len``."""
    slices: int = field(default=1, metadata=at_least(1, MOST_SLICES))
    """``deterministic=layout``: slices of features, added in float64, for ``mesh.tp_size``, which divides it."""
    sum_dtype: SumDType = SumDType.auto
    """dtype of sums of gradient norms and losses over ranks; auto: float64, on NPUs float32."""
    seed: int = field(default=0, metadata=at_least(0, MOST_SEED))
    """Seed for every purpose without a seed of its own."""
    init_seed: int | None = field(default=None, metadata=at_least(0, MOST_SEED))
    """Seed of initial weights; null for ``seed``."""
    data_seed: int | None = field(default=None, metadata=at_least(0, MOST_SEED))
    """Seed of data order and synthetic data; null for ``seed``."""
    sample_seed: int | None = field(default=None, metadata=at_least(0, MOST_SEED))
    """Seed of text generation; null for ``seed``."""

    def __post_init__(self) -> None:
        check_bounds("train", self)
        self.deterministic = Deterministic(self.deterministic)

    @property
    def grain_tokens(self) -> int | None:
        """Tokens of a grain; None where nothing is computed by grains."""
        return self.seq_len // self.grains if self.deterministic.covers_layouts else None

    def resolve(self) -> None:
        """Set missing seeds to ``seed``."""
        for name in ("init_seed", "data_seed", "sample_seed"):
            if getattr(self, name) is None:
                setattr(self, name, self.seed)
