"""FSDPToys: train language models with FSDP1, FSDP2, HSDP, DDP or one process, chosen by
configuration.

The names of ``__all__`` are the stable interface; ``__init__.pyi`` has their types. Each is
imported at its first use, since torch takes seconds.
"""

import importlib
import types
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "ConfigError": "fsdptoys.errors",
    "OptimizerOffload": "fsdptoys.memory",
    "TrainedRun": "fsdptoys.api",
    "Trainer": "fsdptoys.train.trainer",
    "build_loss": "fsdptoys.loss",
    "compare": "fsdptoys.api",
    "compose": "fsdptoys.api",
    "parallelize": "fsdptoys.api",
    "process_group": "fsdptoys.train.distributed",
}
_MODULES = ("plan", "register", "toys", "train")
"""Submodules of the interface; ``plan`` and ``train`` can also be called."""

__all__ = [
    "ConfigError",
    "OptimizerOffload",
    "TrainedRun",
    "Trainer",
    "build_loss",
    "compare",
    "compose",
    "parallelize",
    "plan",
    "process_group",
    "register",
    "toys",
    "train",
]


class CallableModule(types.ModuleType):
    """A package that is also a function of the interface: ``fsdptoys.train(config)`` beside
    ``fsdptoys.train.trainer``."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the function of the same name."""
        name = self.__name__.rpartition(".")[2]
        function = getattr(importlib.import_module("fsdptoys.api"), name)
        return function(*args, **options)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"fsdptoys.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'fsdptoys' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if (Path(__file__).parent / "models").is_file():
    # A checkout or zip whose symbolic links were unpacked as text files (Windows, Python's
    # zipfile): models, patches and configs are then found where the links point to, one folder up.
    __path__.append(str(Path(__file__).parent.parent))
