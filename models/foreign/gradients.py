"""Parameters that get no gradient, found by a forward and backward on fake tensors.

Some families have parameters that no loss reaches: those of an indexer that chooses keys, of hash
routing. FSDP and one process leave them alone, and DDP waits for them.
"""

import torch

from .base import TransformersSettings
from .build import build_causal_lm

TOKENS = 8
MOST_REAL = 2**24
"""Parameters of the largest model that is run with values, where fake tensors do not do."""


def parameters_without_gradients(config: TransformersSettings) -> list[str] | None:
    """Names of parameters without a gradient; None if the model does not run on fake tensors."""
    key = (config.text, config.layers)
    if key not in _NAMES:
        _NAMES[key] = _find(config)
    return _NAMES[key]


_NAMES: dict[tuple[str, int | None], list[str] | None] = {}


def _find(config: TransformersSettings) -> list[str] | None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        # experts have a kernel for fake tensors in bf16 only
        with FakeTensorMode(), torch.device("cpu"):
            model = build_causal_lm(config, torch.bfloat16)
            tokens_BT = torch.zeros(1, TOKENS, dtype=torch.int64)
            model(input_ids=tokens_BT, use_cache=False).logits.float().sum().backward()
    except Exception:  # foreign code, which may not run without values
        with torch.device("meta"):
            model = build_causal_lm(config)
        if sum(param.numel() for param in model.parameters()) > MOST_REAL:
            return None
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            model = build_causal_lm(config)
            tokens_BT = torch.zeros(1, TOKENS, dtype=torch.int64)
            model(input_ids=tokens_BT, use_cache=False).logits.sum().backward()
    return [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and param.grad is None
    ]
