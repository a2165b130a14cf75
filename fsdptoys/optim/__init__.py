"""Optimizers and the learning-rate schedule.

``OPTIMIZERS`` is the registry: a new optimizer is one file here with its config, one YAML in
``configs/optim``, and one entry below.
"""

from collections.abc import Mapping

from fsdptoys.register import registry

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

OPTIMIZERS: Mapping[str, type[OptimConfig]] = registry(
    "optim", {config.name: config for config in (AdamWConfig, SGDConfig, MuonConfig)}
)
"""The word after ``optim=`` → configuration class, also those that own code registers."""

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
