"""Settings that a model lacks, by the table of ``models/capabilities.py``."""

from fsdptoys.config.sections import Sections

from .rule import Rules, Where

MODELS = Rules()

MODELS.exclude(
    "mesh.tp_size",
    "model.capabilities.splits_features=false",
    says="{mesh.tp_size} splits features, which is not built for {model}; set mesh.tp_size=1",
)
MODELS.exclude(
    "mesh.pp_size",
    "model.capabilities.splits_layers=false",
    says="{mesh.pp_size} splits layers, which is not built for {model}; set mesh.pp_size=1",
)
MODELS.exclude(
    "mesh.ep_size",
    "model.capabilities.splits_experts=false",
    says="{mesh.ep_size} splits experts, which is not built for {model}; set mesh.ep_size=1",
)
MODELS.exclude(
    "mesh.cp_size",
    "model.capabilities.shares_sequences=false",
    says="{mesh.cp_size} shares sequences, which is not built for {model}; set mesh.cp_size=1",
)
MODELS.exclude(
    "train.float8",
    "model.capabilities.float8=false",
    says="{train.float8} is not built for {model}; set train.float8=none",
)
MODELS.exclude(
    "tune.base=nf4",
    "model.capabilities.nf4=false",
    says="tune.base=nf4 is not built for {model}; set tune.base=plain",
)
MODELS.exclude(
    "tune.freezes=true",
    "model.capabilities.adapters=false",
    says="{tune} is not built for {model}; set tune=full",
)
MODELS.exclude(
    "train.deterministic=layout",
    "model.capabilities.layout_mode=false",
    says="train.deterministic=layout computes with operations of its own, which {model} does not "
    "use; set train.deterministic=true",
)
MODELS.exclude(
    "data.mask_documents=true",
    "model.capabilities.masks_documents=false",
    says="data.mask_documents=true is not built for {model}; set data.mask_documents=false",
)


def _model_name(config: Sections) -> str:
    """The model as a message names it."""
    name = config.model.name or config.model.family
    kind = getattr(config.model, "model_type", None)
    return f"model={name}" if kind is None else f"model={name} ({kind})"


@MODELS.rule("mesh.cp_size", "model.capabilities.shares_sequences=true")
def model_shares_sequences(config: Sections, where: Where) -> str | None:
    """All that mixes tokens must be an attention that ranks can share."""
    obstacle = config.model.sequence_obstacle()
    if obstacle is None:
        return None
    return (
        f"mesh.cp_size={config.mesh.cp_size} shares sequences among ranks, which "
        f"{_model_name(config)} does not allow: {obstacle}; set mesh.cp_size=1"
    )


@MODELS.rule("data.mask_documents=true", "model.capabilities.masks_documents=true")
def model_keeps_documents_apart(config: Sections, where: Where) -> str | None:
    """All that mixes tokens must be an attention that takes a mask."""
    obstacle = config.model.sequence_obstacle()
    if obstacle is None:
        return None
    return (
        "data.mask_documents=true keeps documents apart, which "
        f"{_model_name(config)} does not allow: {obstacle}; set data.mask_documents=false"
    )


MODELS.exclude(
    "mesh.cp_size",
    "parallel.context=ring",
    "model.attends_plainly=false",
    says="parallel.context=ring computes causal attention alone, and {model} has windows, caps, "
    "sinks or values of another width; set parallel.context=gathered",
)


@MODELS.rule("mesh.cp_size", "parallel.context=ulysses")
def ulysses_divides_heads_of_all_layers(config: Sections, where: Where) -> str | None:
    """Layers may have different numbers of heads."""
    ranks = config.mesh.cp_size
    shared = config.model.shared_heads
    heads = config.model.n_heads
    if shared % ranks == 0 or heads % ranks or shared == heads:
        return None
    return (
        f"parallel.context=ulysses shares heads among mesh.cp_size={ranks} ranks, and "
        f"{_model_name(config)} has layers with numbers of heads that this does not divide; set "
        "parallel.context=gathered"
    )


MODELS.exclude(
    "mesh.cp_size",
    "train.compile=true",
    "model.capabilities.own_kernels=false",
    says="train.compile=true is not built for {model} with {mesh.cp_size}; set "
    "train.compile=false or mesh.cp_size=1",
)
MODELS.exclude(
    "data.mask_documents=true",
    "train.compile=true",
    "model.capabilities.own_kernels=false",
    says="train.compile=true is not built for {model} with data.mask_documents=true; set "
    "train.compile=false or data.mask_documents=false",
)
MODELS.exclude(
    "memory.chunk_loss=true",
    "model.capabilities.chunked_loss=false",
    says="memory.chunk_loss=true needs the head of {model}, which it does not name; define the "
    "method head of its configuration, or set memory.chunk_loss=false",
)
MODELS.exclude(
    "memory.gradient_checkpointing!=none",
    "model.capabilities.has_blocks=false",
    says="{memory.gradient_checkpointing} recomputes blocks, which {model} does not have; define "
    "the method blocks of its configuration, or set memory.gradient_checkpointing=none",
)
MODELS.exclude(
    "train.compile=true",
    "model.capabilities.has_blocks=false",
    says="train.compile=true compiles blocks, which {model} does not have; define the method "
    "blocks of its configuration, or set train.compile=false",
)
MODELS.exclude(
    "parallel.buffer_dtype!=float32",
    "model.capabilities.buffer_dtype=false",
    says="{parallel.buffer_dtype} has no effect on {model}, which chooses the dtype of each "
    "buffer; set parallel.buffer_dtype=float32",
)
MODELS.exclude(
    "memory.gradient_checkpointing=selective",
    "model.capabilities.selective_checkpointing=false",
    says="memory.gradient_checkpointing=selective keeps results that {model} writes to in place; "
    "set memory.gradient_checkpointing=full",
)


@MODELS.rule(
    "parallel.capabilities.shards_parameters=false",
    "parallel.capabilities.single_process=false",
)
def parameters_get_gradients(config: Sections, where: Where) -> str | None:
    """Strategies that reduce whole gradients wait for each of them."""
    names = config.model.without_gradients()
    if not names:
        return None
    model = config.model.name or config.model.family
    return (
        f"parallel={config.parallel.name} waits for the gradient of every parameter, and no loss "
        f"reaches {len(names)} of model={model} ({names[0]}); set parallel=fsdp2"
    )


@MODELS.rule("model.capabilities.own_kernels=false")
def model_has_its_own_kernels(config: Sections, where: Where) -> str | None:
    """A model that computes itself chooses no implementations of operations."""
    for operation, name in config.kernels.names().items():
        if name != "torch":
            model = config.model.name or config.model.family
            return (
                f"kernels.{operation}={name} has no effect on model={model}, which computes "
                f"itself; set kernels.{operation}=auto"
            )
    return None
