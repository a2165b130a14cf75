"""Checkpoints that a run goes on from; and weights in and out, as folders in Hugging Face format or of a run."""

from .choice import RUN_FOLDER, peek
from .config import RESUME_WORDS, CheckpointConfig, Form
from .export import write_hugging_face
from .folder import CHECKSUMS_FILE, check_new_folder
from .hugging_face import HuggingFaceFolder, open_init_from
from .keeper import Checkpoints
from .manifest import MANIFEST_FILE, step_of
from .model_config import check_same, differences
from .reading import Checkpoint
from .saved_weights import CheckpointWeights
from .state import Schema
from .storage import Storage, open_storage
from .tensors import MAX_FILE_BYTES, ReadRegion, TensorFolder, Written, dtype_name
from .weights import WEIGHTS_FOLDER, RunWeights, model_config_of, save_weights

__all__ = [
    "CHECKSUMS_FILE",
    "MANIFEST_FILE",
    "MAX_FILE_BYTES",
    "RESUME_WORDS",
    "RUN_FOLDER",
    "WEIGHTS_FOLDER",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointWeights",
    "Checkpoints",
    "Form",
    "HuggingFaceFolder",
    "ReadRegion",
    "RunWeights",
    "Schema",
    "Storage",
    "TensorFolder",
    "Written",
    "check_new_folder",
    "check_same",
    "differences",
    "dtype_name",
    "model_config_of",
    "open_init_from",
    "open_storage",
    "peek",
    "save_weights",
    "step_of",
    "write_hugging_face",
]
