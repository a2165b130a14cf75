"""The program of one rank. The package is also a function: ``fsdptoys.train(config)``."""

import sys

from fsdptoys import CallableModule

sys.modules[__name__].__class__ = CallableModule
