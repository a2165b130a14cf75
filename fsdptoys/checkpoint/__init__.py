"""Weights in and out: folders in Hugging Face format, and what a run leaves behind of its model."""

from .config import CheckpointConfig
from .export import write_hugging_face
from .folder import CHECKSUMS_FILE, check_new_folder
from .hugging_face import HuggingFaceFolder, open_init_from
from .model_config import check_same, differences
from .tensors import MAX_FILE_BYTES, ReadRegion, TensorFolder, Written, dtype_name
from .weights import WEIGHTS_FOLDER, RunWeights, save_weights

__all__ = [
    "CHECKSUMS_FILE",
    "MAX_FILE_BYTES",
    "WEIGHTS_FOLDER",
    "CheckpointConfig",
    "HuggingFaceFolder",
    "ReadRegion",
    "RunWeights",
    "TensorFolder",
    "Written",
    "check_new_folder",
    "check_same",
    "differences",
    "dtype_name",
    "open_init_from",
    "save_weights",
    "write_hugging_face",
]
