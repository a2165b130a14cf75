"""Small tensors with names that travel as one: through one all-reduce, and through one copy to the
host."""

from collections.abc import Mapping

import torch
from torch import Tensor


class NamedTensors:
    """Tensors by name, as views of one flat tensor.

    Args:
        flat: the tensors' elements, one tensor after another.
        sizes: name → elements, in the order of ``flat``.
    """

    def __init__(self, flat: Tensor, sizes: Mapping[str, int]) -> None:
        self.flat = flat
        self.sizes = dict(sizes)

    @classmethod
    def join(cls, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> "NamedTensors":
        """Copy tensors into a new flat one of ``dtype``."""
        flat = torch.cat([tensor.to(dtype).flatten() for tensor in tensors.values()])
        return cls(flat, {name: tensor.numel() for name, tensor in tensors.items()})

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor, flat."""
        start = 0
        for other, size in self.sizes.items():
            if other == name:
                return self.flat[start : start + size]
            start += size
        raise KeyError(name)
