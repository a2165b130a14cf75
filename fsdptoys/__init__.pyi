"""Types of the interface; the names are imported at their first use."""

import types
from typing import Any

from . import register as register
from . import toys as toys
from .api import TrainedRun as TrainedRun
from .api import compare as compare
from .api import compose as compose
from .api import parallelize as parallelize
from .api import plan as plan
from .api import train as train
from .errors import ConfigError as ConfigError
from .loss import build_loss as build_loss
from .memory import OptimizerOffload as OptimizerOffload
from .train.distributed import process_group as process_group
from .train.trainer import Trainer as Trainer

__version__: str
__all__: list[str]

class CallableModule(types.ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any: ...
