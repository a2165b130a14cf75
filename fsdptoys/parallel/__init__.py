"""Ways to spread a model over ranks, all behind one ``Strategy``."""

from .ddp import DDPConfig
from .fsdp import FSDP1Config, FSDP2Config, ToyFSDPConfig
from .init_weights import Fill, seed_of, seeded
from .single import SingleConfig
from .state import host_copy, whole_tensors
from .strategy import ParallelConfig, ParallelContext, Strategy
from .toy_ddp import ToyDDPConfig
from .toy_zero3 import ToyZero3Config
from .toy_zero12 import ToyZero1Config, ToyZero2Config

__all__ = [
    "DDPConfig",
    "FSDP1Config",
    "FSDP2Config",
    "Fill",
    "ParallelConfig",
    "ParallelContext",
    "SingleConfig",
    "Strategy",
    "ToyDDPConfig",
    "ToyFSDPConfig",
    "ToyZero1Config",
    "ToyZero2Config",
    "ToyZero3Config",
    "host_copy",
    "seed_of",
    "seeded",
    "whole_tensors",
]
