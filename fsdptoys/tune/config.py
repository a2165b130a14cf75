"""Settings of ``tune``, without the layers that they configure."""

from abc import ABC
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import above, at_least, between
from fsdptoys.utils.options import Effect, check_options, option
from fsdptoys.utils.text import short_text

LINEAR_LAYERS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
"""Names of the linear layers of blocks, over all families."""

LONGEST_TARGET = 1000


class Base(Enum):
    """Forms of frozen weights."""

    plain = "plain"
    """In ``parallel.param_dtype``, or in float32 where the strategy updates all weights alike."""
    nf4 = "nf4"
    """In four bits and a half each, the normal float of QLoRA; embeddings, norms, experts and the
    head stay plain."""


@dataclass
class TuneConfig(ABC):
    """Which parameters train."""

    name: ClassVar[str]
    """The word after ``tune=``."""
    freezes: ClassVar[bool] = False
    """Whether the model's own parameters are frozen."""

    def __post_init__(self) -> None:
        check_options("tune", self)


@dataclass
class FullConfig(TuneConfig):
    """All parameters."""

    name: ClassVar[str] = "full"


@dataclass
class LoRAConfig(TuneConfig):
    """Low-rank adapters of linear layers (arXiv:2106.09685)."""

    name: ClassVar[str] = "lora"
    freezes: ClassVar[bool] = True

    rank: int = option(8, at_least(1, 2**16), effect=Effect.training)
    """Rows of an adapter's first matrix, and columns of its second."""
    alpha: float = option(16.0, above(0, 1e6), effect=Effect.training)
    """The adapter's result is multiplied by ``alpha / rank``."""
    dropout: float = option(0.0, between(0, 1, below=True), effect=Effect.training)
    """Share of an adapter's inputs set to zero in training; the same ones under every layout."""
    targets: list[str] = option(list(LINEAR_LAYERS), effect=Effect.training)
    """Linear layers of the blocks that get adapters: names, or for models of transformers regular
    expressions of full names."""

    base: Base = option(Base.plain, effect=Effect.training)
    """Form of the frozen weights of the blocks' linear layers."""
    adapter: str | None = option(None, effect=Effect.training)
    """Folder in PEFT's format whose adapters the run starts from; null for new ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adapter is not None and not self.adapter.strip():
            raise ConfigError(
                f"tune.adapter={self.adapter!r} must name a folder; set tune.adapter=null to "
                "start from new adapters"
            )
        for target in self.targets:
            if not target.strip() or len(target) > LONGEST_TARGET:
                raise ConfigError(
                    f"tune.targets names {short_text(target)}, which is no name of a layer of at "
                    f"most {LONGEST_TARGET} characters; set tune.targets=[q_proj,v_proj]"
                )
        if not self.targets:
            raise ConfigError(
                "tune.targets=[] trains nothing; set tune.targets=[q_proj,v_proj] or tune=full"
            )
