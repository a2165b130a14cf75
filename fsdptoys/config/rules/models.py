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
