"""Settings of a model that is any ``nn.Module``.

    @fsdptoys.register.model("mine")
    class MineConfig(ModuleConfig):
        width: int = 64

        def build(self) -> nn.Module:
            return Mine(self.vocab_size, self.width)

``Mine(tokens_BT)`` returns logits_BTV; no more is needed. Every method below that takes the built
module may be overridden to say more of it.
"""

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from ..capabilities import ModelCapabilities
from ..checks import MOST_TOKENS, at_least, check_bounds
from .base import ModuleSettings
from .module import ModuleModel, find_blocks

BUILD = "build"
"""The method that own code writes."""


@dataclass
class ModuleConfig(ModuleSettings):
    """A model that is any ``nn.Module`` from tokens to logits."""

    family: ClassVar[str] = "module"

    name: str = ""
    """Name of the model, for titles."""
    vocab_size: int = field(default=256, metadata=at_least(1, 2**30))
    """Number of token ids, and of the logits of a token."""
    max_seq_len: int = field(default=4096, metadata=at_least(1, MOST_TOKENS))
    """Longest sequence that the model takes, in tokens."""
    init_from: str | None = None
    """Not for these models, which are in no Hugging Face format; null."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if BUILD in cls.__dict__:
            setattr(cls, BUILD, _adapted(cls.__dict__[BUILD]))

    def __post_init__(self) -> None:
        check_bounds(self)

    def build(self) -> Any:
        """Return the ``nn.Module``, on the current default device."""
        raise NotImplementedError(f"{type(self).__name__} has no method build")

    def blocks(self, module: Any) -> nn.ModuleList | None:
        """Return the list of blocks of a module; None if it has none.

        Strategies shard and gather block by block, and ``memory.gradient_checkpointing`` and
        ``train.compile`` are those of blocks. Without blocks the whole model is one unit.
        Unless overridden, it is the ``nn.ModuleList`` with most parameters and blocks of one class.
        """
        return find_blocks(module)

    def head(self, module: Any) -> nn.Linear | None:
        """Return the last layer of a module, if ``forward`` returns what that layer returns.

        It allows ``memory.chunk_loss``, which never makes all logits.
        """
        return None

    def flops_per_token(self, module: Any, seq_len: int) -> float | None:
        """Return the FLOPs of forward and backward per token; None for 6 per element of its
        matrices, without attention."""
        return None

    @property
    def capabilities(self) -> ModelCapabilities:
        """What can be done with any module."""
        return ModelCapabilities(
            shares_sequences=False,
            splits_experts=False,
            splits_features=False,
            splits_layers=False,
            float8=False,
            nf4=False,
            adapters=False,
            layout_mode=False,
            masks_documents=False,
            own_kernels=False,
            chunked_loss=self._model.has_head,
            has_blocks=len(self._model.layers) > 0,
            fast_estimate=False,
        )

    @property
    def dim(self) -> int:
        """Width of the head's input, or else of the first lookup table."""
        return self._model.width

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return len(self._model.layers)

    @property
    def n_heads(self) -> int:
        """1: heads are the module's own."""
        return 1

    @property
    def tie_embeddings(self) -> bool:
        """Whether the head shares its weight."""
        return self._model.is_tied

    def check(self) -> None:
        """Build the module on the meta device, and call it there."""
        self._model.check()

    def notes(self) -> list[str]:
        """Say what is unknown of the module."""
        return self._model.notes()

    def with_layers(self, count: int) -> "ModuleConfig":
        """Itself: only all blocks can be built."""
        assert count == self.n_layers
        return self

    @property
    def _model(self) -> ModuleModel:
        return _on_meta(type(self), repr(self), _Settings(self))


class _Settings:
    """A configuration that does not take part in the key of a cache."""

    def __init__(self, config: ModuleConfig) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Settings)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=8)
def _on_meta(kind: type, key: str, settings: _Settings) -> ModuleModel:
    with torch.device("meta"):
        model = settings.config.build()
    assert isinstance(model, ModuleModel)
    return model


def _adapted(build: Any) -> Any:
    """Let ``build`` return a model of this project, for a class that is registered."""

    @functools.wraps(build)
    def adapted(self: ModuleConfig) -> ModuleModel:
        module = build(self)
        if isinstance(module, ModuleModel):  # by the class above
            return module
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"{type(self).__name__}.build returned {type(module).__name__}, and must return an "
                "nn.Module"
            )
        return ModuleModel(self, module)

    return adapted
