"""The program of one rank of a run. The package is also a function: ``fsdptoys.train(config)``."""

import sys

from fsdptoys import CallableModule

from .callbacks import Callback, CallbackConfig, StartFacts

sys.modules[__name__].__class__ = CallableModule

__all__ = ["Callback", "CallbackConfig", "StartFacts"]
