"""Optimizers and the learning-rate schedule.

``OPTIMIZERS`` is the registry: a new optimizer is one file here with its config, one YAML in
``configs/optim``, and one entry below.
"""

from .adamw import AdamWConfig, OptimStateDType
from .config import (
    Implementation,
    OptimConfig,
    Schedule,
    WeightDecayOn,
    build_optimizer,
)
from .muon import MatmulDType, MuonConfig, UpdateScale
from .sgd import SGDConfig

OPTIMIZERS: dict[str, type[OptimConfig]] = {
    config.name: config for config in (AdamWConfig, SGDConfig, MuonConfig)
}
"""The word after ``optim=`` → configuration class."""

__all__ = [
    "OPTIMIZERS",
    "AdamWConfig",
    "Implementation",
    "MatmulDType",
    "MuonConfig",
    "OptimConfig",
    "OptimStateDType",
    "SGDConfig",
    "Schedule",
    "UpdateScale",
    "WeightDecayOn",
    "build_optimizer",
]
