"""The program of one rank of a run."""

from .callbacks import Callback, CallbackConfig, StartFacts

__all__ = ["Callback", "CallbackConfig", "StartFacts"]
