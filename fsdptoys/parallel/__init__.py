"""Ways to train a model over ranks, all behind one ``Strategy``.

``STRATEGIES`` is the registry: a new strategy is one file here, one YAML in ``configs/parallel``,
and its config's name below.
"""

from collections.abc import Mapping

from fsdptoys.register import registry

from .config import ParallelConfig
from .ddp import DDPConfig
from .fsdp import FSDPConfig
from .fsdp1 import FSDP1Config
from .fsdp2 import FSDP2Config
from .init_weights import ParamInit, seeded
from .single import SingleConfig
from .state import full_tensors, host_copy
from .strategy import Strategy, World
from .toy_cp import ToyCPConfig
from .toy_ddp import ToyDDPConfig, ToyZero1Config, ToyZero2Config
from .toy_ep import ToyEPConfig
from .toy_fsdp import ToyFSDPConfig
from .toy_zero3 import ToyZero3Config

STRATEGIES: Mapping[str, type[ParallelConfig]] = registry(
    "parallel",
    {
        config.name: config
        for config in (
            SingleConfig,
            DDPConfig,
            FSDP1Config,
            FSDP2Config,
            ToyCPConfig,
            ToyDDPConfig,
            ToyEPConfig,
            ToyFSDPConfig,
            ToyZero1Config,
            ToyZero2Config,
            ToyZero3Config,
        )
    },
)
"""The word after ``parallel=`` → configuration class, also those that own code registers."""

__all__ = [
    "STRATEGIES",
    "DDPConfig",
    "FSDP1Config",
    "FSDP2Config",
    "FSDPConfig",
    "ParallelConfig",
    "ParamInit",
    "SingleConfig",
    "Strategy",
    "ToyCPConfig",
    "ToyDDPConfig",
    "ToyEPConfig",
    "ToyFSDPConfig",
    "ToyZero1Config",
    "ToyZero2Config",
    "ToyZero3Config",
    "World",
    "full_tensors",
    "host_copy",
    "seeded",
]
