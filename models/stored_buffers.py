"""Buffers that are weights: values that a model was trained with beside its parameters, such as the
bias that balances experts.

They are the persistent buffers of PyTorch, which ``state_dict`` has. Every rank has them in full;
checkpoints, final weights and folders in Hugging Face format hold them.
"""

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class StoredBuffer:
    """A persistent buffer, found again after its module has got wrappers or other buffers."""

    name: str
    """Of the model before it is wrapped."""
    owner: nn.Module
    attribute: str

    @property
    def tensor(self) -> Tensor:
        """The buffer as it is now."""
        return self.owner.get_buffer(self.attribute)


def stored_buffers(model: nn.Module) -> list[StoredBuffer]:
    """The persistent buffers of a model that is not wrapped yet, in the order of its modules."""
    return [
        StoredBuffer(f"{prefix}.{name}" if prefix else name, module, name)
        for prefix, module in model.named_modules()
        for name, _ in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]
