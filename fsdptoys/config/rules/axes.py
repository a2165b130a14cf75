"""Tensor and context parallelism against model, data, kernels and formats; shards against rows."""

import math

import torch

from fsdptoys.config.kernel_choice import AttentionKernel
from fsdptoys.config.sections import Sections
from fsdptoys.models import ModelConfig, MoEConfig
from fsdptoys.parallel.context import ContextForm
from fsdptoys.parallel.expert_parallel import fsdp2_can_sum
from fsdptoys.parallel.float8 import uneven_shards

from .rule import Rules, Where

AXES = Rules()


def split_sizes(model: ModelConfig) -> dict[str, int]:
    """Key → size of everything that tensor parallelism splits."""
    sizes = {
        "n_heads": model.n_heads,
        "n_kv_heads": getattr(model, "n_kv_heads", model.n_heads),
    }
    if not (isinstance(model, MoEConfig) and model.has_experts_everywhere()):
        sizes["ffn_dim"] = getattr(model, "ffn_dim", None) or model.implied()["ffn_dim"]
    if isinstance(model, MoEConfig) and model.shares_an_expert:
        sizes["expert_ffn_dim"] = model.expert_ffn_dim
    return sizes | {"vocab_size": model.vocab_size}


@AXES.rule("mesh.tp_size")
def ranks_divide_features(config: Sections, where: Where) -> str | None:
    """Tensor parallelism splits heads, hidden features and the vocabulary."""
    ranks = where.axes.tp
    sizes = split_sizes(config.model)
    undivided = {key: size for key, size in sizes.items() if size % ranks}
    if not undivided:
        return None
    key, size = next(iter(undivided.items()))
    common = math.gcd(ranks, *sizes.values())
    fix = (
        "set "
        f"mesh.tp_size={max(fitting for fitting in range(1, common + 1) if common % fitting == 0)}"
    )
    if list(undivided) == ["vocab_size"]:
        fix += f" or model.vocab_size={-(-size // ranks) * ranks}"
    return f"mesh.tp_size={ranks} splits features, and must divide model.{key}={size}; {fix}"


@AXES.rule("mesh.tp_size")
def ranks_divide_tokens(config: Sections, where: Where) -> str | None:
    """Tokens are split between layers (sequence parallelism)."""
    seq_len = config.train.seq_len
    axes = where.axes
    if seq_len % axes.sharing == 0:
        return None
    shared = f" with mesh.cp_size={axes.cp}" if axes.cp > 1 else ""
    return (
        f"train.seq_len={seq_len} must be a multiple of {axes.sharing}, the pieces into which "
        f"mesh.tp_size={axes.tp} cuts a sequence between layers{shared}; set "
        f"train.seq_len={max(1, seq_len // axes.sharing) * axes.sharing}"
    )


AXES.exclude(
    "mesh.tp_size",
    "train.float8",
    says="{train.float8} scales by the largest number of a full matrix, which {mesh.tp_size} "
    "splits; set train.float8=none or mesh.tp_size=1",
)
AXES.exclude(
    "mesh.tp_size",
    "optim.exchanges_matrices=true",
    says="{optim} orthogonalizes full matrices, which {mesh.tp_size} splits; set optim=adamw or "
    "mesh.tp_size=1",
)
AXES.exclude(
    "mesh.tp_size",
    "optim.low_bit_format!=null",
    says="{optim.state_dtype} keeps a scale for each part of a full row, which {mesh.tp_size} "
    "splits; set optim.state_dtype=bfloat16 or mesh.tp_size=1",
)
AXES.exclude(
    "mesh.tp_size",
    when=lambda config, where: (
        isinstance(config.model, MoEConfig) and not fsdp2_can_sum()
    ),
    says="{model} has experts, for which FSDP2 must sum gradients (torch 2.11 and later can), and "
    "tokens, which {mesh.tp_size} splits; set parallel=ddp or mesh.tp_size=1",
)


def _form(config: Sections) -> ContextForm:
    """Return the form of context parallelism of a run with ``mesh.cp_size``."""
    form: ContextForm = config.parallel.context  # type: ignore[attr-defined]
    return form


AXES.exclude(
    "mesh.cp_size",
    when=lambda config, where: (
        _form(config) not in config.parallel.capabilities.context_forms
    ),
    says="{parallel.context} is not an option of {parallel}; set parallel.context=auto",
)


@AXES.rule("mesh.cp_size", "parallel.context=ulysses")
def ulysses_divides_heads(config: Sections, where: Where) -> str | None:
    """Ulysses exchanges tokens for heads."""
    ranks = config.mesh.cp_size
    tp = config.mesh.tp_size
    heads = config.model.n_heads // tp
    if heads % ranks == 0:
        return None
    fitting = max(
        size for size in range(1, ranks) if heads % size == 0 and ranks % size == 0
    )
    of = "the model" if tp == 1 else f"a rank of mesh.tp_size={tp}"
    other = config.parallel.capabilities.context_forms[1].value
    return (
        f"parallel.context=ulysses shares heads among mesh.cp_size={ranks} ranks, which does not "
        f"divide the {heads} heads of {of}; set "
        f"parallel.context={other}{f' or mesh.cp_size={fitting}' * (fitting > 1)}"
    )


@AXES.rule("mesh.cp_size")
def pieces_divide_sequences(config: Sections, where: Where) -> str | None:
    """Each rank has equal pieces of a sequence."""
    form = _form(config)
    ranks = config.mesh.cp_size
    seq_len = config.train.seq_len
    pieces = form.pieces_per_rank * ranks
    if seq_len % pieces == 0:
        return None
    heads = config.model.n_heads // config.mesh.tp_size
    fits_ulysses = (
        form is not ContextForm.ulysses and seq_len % ranks == 0 and heads % ranks == 0
    )
    return (
        f"train.seq_len={seq_len} must be a multiple of {pieces}, the pieces into which "
        f"parallel.context={form.value} cuts a sequence with mesh.cp_size={ranks}; set "
        f"train.seq_len={max(1, seq_len // pieces) * pieces}"
        f"{' or parallel.context=ulysses' * fits_ulysses}"
    )


AXES.exclude(
    "mesh.cp_size",
    "parallel.context=ring",
    "data.mask_documents=true",
    says=(
        "parallel.context=ring does not keep documents apart, as data.mask_documents=true asks "
        "for; set parallel.context=auto or data.mask_documents=false"
    ),
)
AXES.exclude(
    "mesh.cp_size",
    "kernels.document_attention=flex",
    "data.mask_documents=true",
    "parallel.context!=ulysses",
    says="kernels.document_attention=flex computes full sequences, of which {parallel.context} "
    "leaves each rank some rows; set kernels.document_attention=torch or parallel.context=ulysses",
)
PARTIAL = {
    ContextForm.ring: (
        AttentionKernel.torch,
        AttentionKernel.flash,
        AttentionKernel.math,
    ),
    ContextForm.gathered: (
        *(AttentionKernel.torch, AttentionKernel.flash, AttentionKernel.math),
        *(AttentionKernel.efficient, AttentionKernel.npu),
    ),
}
"""Kernels that compute parts of a sequence: gathered rows with a mask, a ring's blocks by flash or
matmuls."""
AXES.exclude(
    "mesh.cp_size",
    "parallel.context!=ulysses",
    when=lambda config, where: config.kernels.attention not in PARTIAL[_form(config)],
    says="{kernels.attention} cannot compute the parts of a sequence of {parallel.context}; set "
    "kernels.attention=torch or parallel.context=ulysses",
)


AXES.exclude(
    "mesh.cp_size",
    "parallel.context!=ulysses",
    "kernels.attention=flash",
    "launch.device=cuda",
    when=lambda config, where: config.model.head_width % 8 > 0,
    says="kernels.attention=flash takes heads whose width is a multiple of 8 with "
    "{parallel.context}, and this model's have {model.head_width}; set kernels.attention=torch or "
    "parallel.context=ulysses",
)
AXES.exclude(
    "parallel.capabilities.ring_kernels=false",
    "parallel.context=ring",
    "model.attention_chunk_len!=null",
    when=lambda config, where: config.model.attention_chunk_len < config.train.seq_len,  # type: ignore[attr-defined]
    says="{model.attention_chunk_len} is not an option of {parallel} parallel.context=ring, which "
    "has causal attention of its own; set parallel.context=ulysses",
)


@AXES.rule("parallel.capabilities.uses_dtensor=true")
def shards_have_rows(config: Sections, where: Where) -> str | None:
    """FSDP2 cuts between rows."""
    dim = config.model.dim
    if config.mesh.shard_ranks(where.world_size) <= dim:
        return None
    fitting = max(size for size in range(1, dim + 1) if where.world_size % size == 0)
    return (
        f"mesh.fsdp_size={config.mesh.fsdp_size} cuts parameters of {dim} rows (model.dim) into "
        f"{config.mesh.shard_ranks(where.world_size)} shards, so that ranks would hold nothing "
        f"of them; set mesh.fsdp_size={fitting}"
    )


@AXES.rule("parallel.capabilities.uses_dtensor=true", "train.float8_all_gather=true")
def float8_shards_are_even(config: Sections, where: Where) -> str | None:
    """A gather in float8 has equal shards."""
    with torch.device("meta"):
        return uneven_shards(
            config.model.build(), config.mesh.shard_ranks(where.world_size)
        )
