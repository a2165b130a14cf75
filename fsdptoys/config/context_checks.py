"""Check context parallelism against model, data and kernels, and choose its form."""

from fsdptoys.errors import ConfigError
from fsdptoys.models import ModelConfig
from fsdptoys.parallel import ParallelConfig
from fsdptoys.parallel.context import ContextForm
from fsdptoys.parallel.mesh import MeshConfig
from fsdptoys.parallel.strategy import ReducingConfig

from .kernel_choice import AttentionKernel, DocumentKernel, KernelConfig


def check_context(
    parallel: ParallelConfig,
    mesh: MeshConfig,
    model: ModelConfig,
    kernels: KernelConfig,
    *,
    seq_len: int,
    masks: bool,
    device_type: str,
) -> None:
    """Replace ``parallel.context=auto``, and check the form of resolved settings.

    Args:
        parallel: settings of a strategy.
        mesh: resolved.
        model: settings of the model.
        kernels: resolved.
        seq_len: tokens of a full sequence.
        masks: whether documents are kept apart.
        device_type: of the run.

    Raises:
        ConfigError: naming key, value and fix.
    """
    form, ranks = getattr(parallel, "context", ContextForm.auto), mesh.cp_size
    if ranks == 1:
        if form is not ContextForm.auto:
            raise ConfigError(
                f"parallel.context={form.value} has no effect with mesh.cp_size=1, where each rank has full sequences; "
                "set parallel.context=auto or mesh.cp_size=2"
            )
        return
    assert isinstance(parallel, ReducingConfig)
    heads, forms = model.n_heads // mesh.tp_size, parallel.context_forms
    if form is ContextForm.auto:
        form = parallel.context = forms[1] if heads % ranks else ContextForm.ulysses
    if form not in forms:
        raise ConfigError(
            f"parallel.context={form.value} is not an option of parallel={parallel.name}; set parallel.context=auto"
        )
    if form is ContextForm.ulysses and heads % ranks:
        fitting = max(size for size in range(1, ranks) if heads % size == 0 and ranks % size == 0)
        of = "the model" if mesh.tp_size == 1 else f"a rank of mesh.tp_size={mesh.tp_size}"
        raise ConfigError(
            f"parallel.context=ulysses shares heads among mesh.cp_size={ranks} ranks, which does not divide the "
            f"{heads} heads of {of}; set parallel.context={forms[1].value}"
            f"{f' or mesh.cp_size={fitting}' * (fitting > 1)}"
        )
    _check_length(form, ranks, seq_len, heads)
    if form is ContextForm.ring and masks:
        raise ConfigError(
            "parallel.context=ring does not keep documents apart, as data.mask_documents=true asks for; set "
            "parallel.context=auto or data.mask_documents=false"
        )
    if form is not ContextForm.ulysses:
        _check_kernels(form, kernels, model.head_width if device_type == "cuda" else 8, masks)


def _check_length(form: ContextForm, ranks: int, seq_len: int, heads: int) -> None:
    pieces = form.pieces_per_rank * ranks
    if seq_len % pieces == 0:
        return
    fix = f"set train.seq_len={max(1, seq_len // pieces) * pieces}"
    if form is not ContextForm.ulysses and seq_len % ranks == 0 and heads % ranks == 0:
        fix += " or parallel.context=ulysses"
    raise ConfigError(
        f"train.seq_len={seq_len} must be a multiple of {pieces}, the pieces into which parallel.context={form.value} "
        f"cuts a sequence with mesh.cp_size={ranks}; {fix}"
    )


def _check_kernels(form: ContextForm, kernels: KernelConfig, head_width: int, masks: bool) -> None:
    """Refuse kernels that cannot compute attention in parts of a sequence."""
    if masks and kernels.document_attention is DocumentKernel.flex:
        raise ConfigError(
            f"kernels.document_attention=flex computes full sequences, of which parallel.context={form.value} leaves "
            "each rank some rows; set kernels.document_attention=torch or parallel.context=ulysses"
        )
    # Gathered rows are computed with a mask, the ring's blocks by flash attention or by matmuls.
    fitting = {AttentionKernel.torch, AttentionKernel.flash, AttentionKernel.math}
    fitting |= {AttentionKernel.efficient, AttentionKernel.npu} if form is ContextForm.gathered else set()
    name = kernels.attention
    if name not in fitting:
        raise ConfigError(
            f"kernels.attention={name.value} cannot compute the parts of a sequence of parallel.context={form.value}; "
            "set kernels.attention=torch or parallel.context=ulysses"
        )
    if name is AttentionKernel.flash and head_width % 8:
        raise ConfigError(
            f"kernels.attention=flash takes heads whose width is a multiple of 8 with parallel.context={form.value}, "
            f"and those of this model have {head_width} channels; set kernels.attention=torch or "
            "parallel.context=ulysses"
        )
