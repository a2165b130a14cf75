"""Settings that a strategy lacks, by the table of ``parallel/capabilities.py``."""

from fsdptoys.parallel.capabilities import REFUSALS

from .rule import Rules

STRATEGIES = Rules()

for _refusal in REFUSALS:
    STRATEGIES.exclude(
        *_refusal.settings,
        f"parallel.capabilities.{_refusal.capability}=false",
        says=_refusal.sentence,
    )
