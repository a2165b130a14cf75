"""Ways to spread a model over ranks, all behind one ``Strategy``."""

from .ddp import DDPConfig
from .fsdp import FSDP1Config, FSDP2Config, ToyFSDPConfig
from .initialise import Fill, seed_of, seeded
from .single import SingleConfig
from .state import host_copy, whole_tensors
from .strategy import ParallelConfig, ParallelContext, Strategy

__all__ = [
    "DDPConfig",
    "FSDP1Config",
    "FSDP2Config",
    "Fill",
    "ParallelConfig",
    "ParallelContext",
    "SingleConfig",
    "Strategy",
    "ToyFSDPConfig",
    "host_copy",
    "seed_of",
    "seeded",
    "whole_tensors",
]
