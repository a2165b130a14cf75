"""Whether torchao can be used here, found without importing it, which takes seconds."""

import importlib.util

import torch


def torchao_fault() -> str | None:
    """Why torchao cannot be imported, and the fix, to follow "torchao, which"; None if it can
    be."""
    if importlib.util.find_spec("torchao") is None:
        return "is not installed; run pip install -e '.[torchao]'"
    # Imported by torchao 0.18, the oldest that is supported; torch 2.7 lacks it, 2.11 to 2.15 have
    # it.
    if not hasattr(torch.nn.functional, "ScalingType"):
        return f"cannot be imported with torch {torch.__version__}; install torch 2.11 or newer"
    return None
