"""What can be done with a model: the mesh axes and switches that it supports.

``config/rules/models.py`` has the sentence with which a setting is refused.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelCapabilities:
    """Facts about a model; the families of this package have all of them."""

    shares_sequences: bool = True
    """``mesh.cp_size``."""
    splits_experts: bool = True
    """``mesh.ep_size``, for a model with experts."""
    splits_features: bool = True
    """``mesh.tp_size``."""
    splits_layers: bool = True
    """``mesh.pp_size``."""
    float8: bool = True
    """``train.float8``."""
    nf4: bool = True
    """``tune.base=nf4``."""
    adapters: bool = True
    """``tune=lora``."""
    layout_mode: bool = True
    """``train.deterministic=layout``."""
    masks_documents: bool = True
    """``data.mask_documents``."""
    own_kernels: bool = True
    """``kernels.*`` choose what computes its operations."""
    buffer_dtype: bool = True
    """``parallel.buffer_dtype``; otherwise the model chooses the dtype of each buffer."""
    selective_checkpointing: bool = True
    """``memory.gradient_checkpointing=selective``."""
    has_float32_modules: bool = False
    """Some modules may compute in float32 in every dtype."""
    chunked_loss: bool = True
    """``memory.chunk_loss``."""
    has_blocks: bool = True
    """Switches of blocks: ``memory.gradient_checkpointing``, ``train.compile`` and
    ``parallel.wrap``."""
    fast_estimate: bool = True
    """The planner can put an estimate together from traces of its parts."""
