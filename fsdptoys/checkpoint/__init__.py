"""Checkpoints to resume runs from, and import and export of weights (Hugging Face format, run
directories)."""

from .checkpointer import Checkpointer as Checkpointer
from .checksums import CHECKSUMS_FILE as CHECKSUMS_FILE
from .checksums import verify_checksums as verify_checksums
from .config import CheckpointConfig as CheckpointConfig
from .config import Form as Form
from .hf_folder import HuggingFaceFolder as HuggingFaceFolder
from .hf_folder import open_init_from as open_init_from
from .hf_folder import read_token_ids as read_token_ids
from .hf_folder import write_hugging_face as write_hugging_face
from .load import Checkpoint as Checkpoint
from .manifest import MANIFEST_FILE as MANIFEST_FILE
from .manifest import Schema as Schema
from .manifest import step_of as step_of
from .model_config import check_same as check_same
from .model_config import differences as differences
from .model_config import named_weights as named_weights
from .model_config import weights_format as weights_format
from .safetensors_io import MAX_FILE_BYTES as MAX_FILE_BYTES
from .safetensors_io import ReadRegion as ReadRegion
from .safetensors_io import Written as Written
from .safetensors_io import dtype_name as dtype_name
from .select import RUN_FOLDER as RUN_FOLDER
from .select import peek as peek
from .weights import WEIGHTS_FOLDER as WEIGHTS_FOLDER
from .weights import CheckpointWeights as CheckpointWeights
from .weights import RunWeights as RunWeights
from .weights import model_config_of as model_config_of
from .weights import run_model_config as run_model_config
from .weights import save_weights as save_weights
