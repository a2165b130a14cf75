"""Formats of numbers: float8, the loss scale, sums over ranks."""

from fsdptoys.config.sections import Sections
from fsdptoys.device import KINDS, float64_collectives
from fsdptoys.parallel.float8 import MULTIPLE

from .rule import Rules, Where

NUMBERS = Rules()

NUMBERS.exclude(
    "train.sum_dtype=float64",
    when=lambda config, where: not float64_collectives(where.device_type),
    says="train.sum_dtype=float64 needs collectives of float64, which {launch.device} does not "
    "have; set train.sum_dtype=float32",
)
NUMBERS.exclude(
    "train.sum_dtype=float32",
    "train.deterministic!=false",
    when=lambda config, where: float64_collectives(where.device_type),
    says="train.sum_dtype=float32 contradicts {train.deterministic}, whose norms and losses have "
    "the same bits on any layout, for which they are added up in float64; set train.sum_dtype=auto",
)
NUMBERS.exclude(
    "train.float8_all_gather=true",
    "train.float8=rowwise",
    says=(
        "train.float8_all_gather=true gathers weights with one scale a tensor, and "
        "train.float8=rowwise has one a row; set train.float8=tensorwise or "
        "train.float8_all_gather=false"
    ),
)
NUMBERS.exclude(
    "train.float8_all_gather=true",
    "memory.cpu_offload=true",
    says=(
        "train.float8_all_gather=true casts shards on the device, and memory.cpu_offload=true "
        "keeps them in host memory; set memory.cpu_offload=false or train.float8_all_gather=false"
    ),
)
NUMBERS.exclude(
    "train.float8_all_gather=true",
    "launch.device=cpu",
    when=lambda config, where: config.parallel.hooks_parts_of_blocks(config.model),
    says=(
        "train.float8_all_gather=true leaves units within a block with float8 alone, which gloo "
        "does not gather; set parallel.wrap=block parallel.wrap_classes=[] "
        "parallel.min_params=null"
    ),
)
for _device, _kind in KINDS.items():
    if not _kind.has_float8:
        NUMBERS.exclude(
            "train.float8",
            f"launch.device={_device}",
            says="{train.float8} needs float8 matmuls, which {launch.device} does not have; set "
            "train.float8=none",
        )
NUMBERS.exclude(
    "train.float8",
    "parallel.param_dtype!=bfloat16",
    "launch.device=cuda",
    says="{train.float8} replaces matmuls of bfloat16 on a GPU, and {parallel.param_dtype} has "
    "none; set parallel.param_dtype=bfloat16",
)


@NUMBERS.rule("train.float8", "launch.device=cuda")
def float8_multiplies_whole_tiles(config: Sections, where: Where) -> str | None:
    """float8 matmuls take dims that 16 divides, the tokens of a micro-batch among them."""
    train = config.train
    tokens = train.batch_size * train.seq_len // config.mesh.cp_size
    if tokens % MULTIPLE == 0:
        return None
    return (
        f"train.float8={train.float8.value} multiplies over the tokens of a micro-batch, and "
        f"train.batch_size times train.seq_len over mesh.cp_size is {tokens}, which {MULTIPLE} "
        f"does not divide; set train.seq_len to a multiple of {MULTIPLE} times mesh.cp_size"
    )


NUMBERS.exclude(
    "memory.optimizer_in_backward=true",
    "parallel.param_dtype=float16",
    says=(
        "memory.optimizer_in_backward=true updates before it is known whether a gradient of "
        "parallel.param_dtype=float16 overflowed, which skips the step; set "
        "memory.optimizer_in_backward=false or parallel.param_dtype=bfloat16"
    ),
)
NUMBERS.exclude(
    "train.skip_nonfinite=false",
    "parallel.param_dtype=float16",
    says=(
        "train.skip_nonfinite=false would update with overflowed gradients, from which "
        "parallel.param_dtype=float16 finds its loss scale; set train.skip_nonfinite=true or "
        "parallel.param_dtype=bfloat16"
    ),
)
