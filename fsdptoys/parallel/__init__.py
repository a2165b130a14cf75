"""Ways to spread a model over ranks, all behind one ``Strategy``."""

from .ddp import DDPConfig
from .fsdp1 import FSDP1Config
from .fsdp2 import FSDP2Config
from .initialise import seed_of
from .single import SingleConfig
from .strategy import ParallelConfig, ParallelContext, Strategy

__all__ = [
    "DDPConfig",
    "FSDP1Config",
    "FSDP2Config",
    "ParallelConfig",
    "ParallelContext",
    "SingleConfig",
    "Strategy",
    "seed_of",
]
