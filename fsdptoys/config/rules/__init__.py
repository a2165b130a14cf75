"""Which settings exclude one another, by topic; ``rule.py`` says how a rule is written."""

from .axes import AXES
from .kernels import KERNELS
from .layout_mode import LAYOUT_MODE
from .loss import LOSS
from .memory import MEMORY
from .models import MODELS
from .numbers import NUMBERS
from .optimizer import OPTIMIZER
from .pipeline import PIPELINE
from .rule import Rule, Where, check_rules
from .run import CONTINUATION, SIZES
from .strategies import STRATEGIES
from .tune import TUNE

RULES = [
    rule
    for topic in (
        KERNELS,
        SIZES,
        STRATEGIES,
        NUMBERS,
        TUNE,
        OPTIMIZER,
        AXES,
        PIPELINE,
        LAYOUT_MODE,
        LOSS,
        MEMORY,
        CONTINUATION,
    )
    for rule in topic.all
]
"""In the order in which they are checked."""

MODEL_RULES = MODELS.all
"""On what the model lacks, which are checked before all others."""

__all__ = ["MODEL_RULES", "RULES", "Rule", "Where", "check_rules"]
