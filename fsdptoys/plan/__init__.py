"""Predicts the memory and time of a run without its hardware: ``fsdptoys plan``.

The package is also a function: ``fsdptoys.plan(config)``.
"""

import sys

from fsdptoys import CallableModule

sys.modules[__name__].__class__ = CallableModule
