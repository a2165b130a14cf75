"""Sources of data by name."""

from collections.abc import Mapping

from fsdptoys.register import registry

from .bin import BinConfig
from .byte_text import TextConfig
from .chat import ChatConfig
from .dataset import DataConfig
from .hf import HFConfig
from .prepared import PreparedConfig
from .synthetic import SyntheticConfig

DATASETS: Mapping[str, type[DataConfig]] = registry(
    "data",
    {
        config.name: config
        for config in (
            SyntheticConfig,
            TextConfig,
            BinConfig,
            PreparedConfig,
            HFConfig,
            ChatConfig,
        )
    },
)
"""The name after ``data=`` → the dataclass that ``configs/data/NAME.yaml`` starts from, also those
that own code registers."""
