"""Which parameters train: all of a model, or low-rank adapters beside its frozen weights.

``TUNINGS`` is the registry.
"""

from .config import Base, FullConfig, LoRAConfig, TuneConfig

TUNINGS: dict[str, type[TuneConfig]] = {
    config.name: config for config in (FullConfig, LoRAConfig)
}
"""The word after ``tune=`` → configuration class."""

__all__ = ["TUNINGS", "Base", "FullConfig", "LoRAConfig", "TuneConfig"]
