"""The number formats of a run, and the same mixed precision for models that no FSDP wraps."""

from enum import Enum

import torch
from torch import Tensor, nn


class DType(Enum):
    """Number formats of parameters in compute, and of buffers."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype of that name."""
        return getattr(torch, self.value)


class ReduceDType(Enum):
    """Number formats in which gradients are summed over ranks."""

    auto = "auto"
    """float64 under ``train.deterministic``, else float32."""
    float32 = "float32"
    bfloat16 = "bfloat16"
    float64 = "float64"

    def resolve(self, deterministic: bool) -> "ReduceDType":
        """Replace ``auto`` by what it stands for."""
        if self is not ReduceDType.auto:
            return self
        return ReduceDType.float64 if deterministic else ReduceDType.float32

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype of that name; ``auto`` must have been resolved."""
        assert self is not ReduceDType.auto
        return getattr(torch, self.value)


class CastParameters(nn.Module):
    """Runs a model on low-precision copies of its float32 parameters, as FSDP's ``param_dtype`` does.

    Gradients come back through the cast and so accumulate in float32. The copies of all parameters live from the
    forward to the end of the backward.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self.dtype = dtype

    def forward(self, *args: object) -> Tensor:
        """Call the model with its parameters cast."""
        cast = {name: param.to(self.dtype) for name, param in self.module.named_parameters()}
        return torch.func.functional_call(self.module, cast, args)
