"""Checkpoints to resume runs from, and import and export of weights (Hugging Face format, run directories)."""

from .atomic_folder import CHECKSUMS_FILE, check_new_folder, verify_checksums
from .checkpointer import Checkpointer
from .config import CheckpointConfig, Form
from .hf_folder import HuggingFaceFolder, open_init_from, write_hugging_face
from .load import Checkpoint
from .manifest import MANIFEST_FILE, Schema, step_of
from .model_config import check_same, differences
from .safetensors_io import MAX_FILE_BYTES, ReadRegion, Written, dtype_name
from .select import RUN_FOLDER, peek
from .weights import WEIGHTS_FOLDER, CheckpointWeights, RunWeights, model_config_of, save_weights

__all__ = [
    "CHECKSUMS_FILE",
    "MANIFEST_FILE",
    "MAX_FILE_BYTES",
    "RUN_FOLDER",
    "WEIGHTS_FOLDER",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointWeights",
    "Checkpointer",
    "Form",
    "HuggingFaceFolder",
    "ReadRegion",
    "RunWeights",
    "Schema",
    "Written",
    "check_new_folder",
    "check_same",
    "differences",
    "dtype_name",
    "model_config_of",
    "open_init_from",
    "peek",
    "save_weights",
    "step_of",
    "verify_checksums",
    "write_hugging_face",
]
