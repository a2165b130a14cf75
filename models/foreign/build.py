"""Construction of a model by transformers' own classes."""

import os
from typing import Any

import torch

from .architecture import transformers_config
from .base import TransformersSettings
from .json_text import one_line


def build_causal_lm(
    config: TransformersSettings, dtype: torch.dtype = torch.float32
) -> Any:
    """Construct the model on the current default device.

    Nothing is downloaded and no code of a folder runs; kernels of the hub are switched off.

    Args:
        config: of the run.
        dtype: of parameters.

    Raises:
        ValueError: if transformers cannot build it.
    """
    settings = transformers_config(config.text, config.layers)
    # transformers reads it once, when it loads a family's file
    os.environ.setdefault("USE_HUB_KERNELS", "NO")
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(
            settings, dtype=dtype, trust_remote_code=False
        )
    except Exception as mistake:  # of any kind, as content and classes are foreign
        raise ValueError(
            f"transformers cannot build a model of type {settings.model_type} from this "
            f"config.json ({type(mistake).__name__}: {one_line(mistake)}); use the file that came "
            "with the model"
        ) from mistake
