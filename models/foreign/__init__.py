"""Models of transformers, read from the ``config.json`` of a folder and built by its own classes.

``config`` describes one, ``adapter`` shows it to strategies, planner and trainer like a model of
this project. transformers is imported in functions only: a launcher without such a model does not
need it.

``module`` shows any other ``nn.Module`` in the same way, for a configuration that own code derives
from ``ModuleConfig``.
"""

from .config import TransformersConfig
from .module_config import ModuleConfig

__all__ = ["ModuleConfig", "TransformersConfig"]
