"""Buffers of a model of transformers: their values, their dtypes, and modules kept in float32.

Construction on the meta device leaves buffers empty. transformers' own initialization computes all
of them, if parameters are marked as initialized, which it then skips. It runs before FSDP1 and
after FSDP2, on plain buffers.

A model of another dtype has most buffers in that dtype, but rotary frequencies in float32, as its
classes choose. So the dtypes are read from a second model on the meta device.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .base import TransformersBase
from .build import build_causal_lm


def modules_with_buffers(model: TransformersBase) -> list[nn.Module]:
    """Modules that own buffers, the decoder included."""
    modules = [*model.modules(), model.decoder]
    return [
        module
        for module in dict.fromkeys(modules)
        if any(buffer is not None for buffer in module._buffers.values())
    ]


def initializers_of(hf: nn.Module) -> dict[nn.Module, Callable[[nn.Module], None]]:
    """Module → the ``_init_weights`` of transformers that it is initialized by: that of the
    innermost model that contains it."""
    result: dict[nn.Module, Callable[[nn.Module], None]] = {}

    def visit(module: nn.Module, initialize: Callable[[nn.Module], None]) -> None:
        initialize = getattr(module, "_init_weights", initialize)
        result[module] = initialize
        for child in module.children():
            visit(child, initialize)

    visit(hf, lambda module: None)
    return result


@torch.no_grad()
def compute_buffers(model: TransformersBase, device: torch.device) -> None:
    """Allocate all buffers on a device and compute their values."""
    initializers = initializers_of(model.hf)
    for param in model.parameters():
        param._is_hf_initialized = True  # type: ignore[attr-defined]
    for module in modules_with_buffers(model):
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        initializers[module](module)


def buffer_dtypes(
    model: TransformersBase, param_dtype: torch.dtype
) -> dict[tuple[nn.Module, str], torch.dtype]:
    """(module, name of a buffer) → its dtype in a model of ``param_dtype``."""
    if param_dtype is torch.float32:
        return {}
    with torch.device("meta"):
        other: Any = build_causal_lm(model.config, param_dtype)
    dtypes = {name: buffer.dtype for name, buffer in other.named_buffers()}
    owners: dict[tuple[int, str], tuple[nn.Module, str]] = {}
    for module in modules_with_buffers(model):
        for name in module._buffers:
            owners[id(module), name] = (module, name)
    result: dict[tuple[nn.Module, str], torch.dtype] = {}
    for own_name, their_name in model.hugging_face_names.items():
        if their_name not in dtypes:
            continue
        prefix, _, name = own_name.rpartition(".")
        module = model.get_submodule(prefix)
        if (id(module), name) in owners:
            result[module, name] = dtypes[their_name]
    return result


def undefined_buffers(
    model: TransformersBase, initialized: Sequence[Tensor]
) -> list[str]:
    """Names of buffers that an initialization did not write."""
    ids = {id(buffer) for buffer in initialized}
    return [
        f"{type(module).__name__}.{name}"
        for module in modules_with_buffers(model)
        for name, buffer in module._buffers.items()
        if buffer is not None and id(buffer) not in ids
    ]


def float32_names(model: nn.Module, hf: Any) -> list[str]:
    """Names of modules with parameters that transformers keeps in float32 in bf16 and float16."""
    patterns = getattr(hf, "_keep_in_fp32_modules_strict", None) or ()
    if not patterns:
        return []
    matches = re.compile(
        "|".join(rf"(^|\.){re.escape(pattern)}($|\.)" for pattern in sorted(patterns))
    )
    return [
        name
        for name, module in model.named_modules()
        if any(
            matches.search(f"{name}.{attribute}")
            for attribute, param in module.named_parameters(recurse=False)
            if isinstance(param, Tensor)
        )
    ]
