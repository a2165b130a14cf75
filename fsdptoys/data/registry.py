"""Sources of data by name."""

from .bin import BinConfig
from .byte_text import TextConfig
from .chat import ChatConfig
from .dataset import DataConfig
from .hf import HFConfig
from .prepared import PreparedConfig
from .synthetic import SyntheticConfig

DATASETS: dict[str, type[DataConfig]] = {
    config.name: config
    for config in (
        SyntheticConfig,
        TextConfig,
        BinConfig,
        PreparedConfig,
        HFConfig,
        ChatConfig,
    )
}
"""The name after ``data=`` → the dataclass that ``configs/data/NAME.yaml`` starts from."""
