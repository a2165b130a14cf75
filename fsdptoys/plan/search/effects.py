"""Effects of the best combination's settings: predicted candidates that differ from it in one of
them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdptoys.config.schema import Config
from fsdptoys.utils.text import value_text

from .combinations import PIPELINE, REDUCES_OFTEN
from .ranking import Candidate
from .switches import read

KEYS = (
    "parallel",
    "mesh.fsdp_size",
    "mesh.tp_size",
    "mesh.cp_size",
    "mesh.ep_size",
    "mesh.pp_size",
    "parallel.schedule",
    "train.grad_accum",
    "parallel.wrap",
    "parallel.reshard_after_forward",
    REDUCES_OFTEN,
    "memory.gradient_checkpointing",
    "memory.activation_offload",
    "memory.chunk_loss",
    "memory.optimizer_offload",
    "memory.cpu_offload",
    "memory.cpu_offload_executor",
    "train.batch_size",
)
"""Everything that a search varies, in the order of the output."""


@dataclass(frozen=True)
class Effect:
    """A setting of the best combination against another value of it, all others equal."""

    setting: str  # ``key=value`` of the best
    instead_of: str  # The other value
    # Reserved memory that the best needs less; negative if it needs more
    saved_bytes: int
    added_seconds: float  # Of a step; negative if the best is faster
    speedup: float  # Relative difference in tokens per second
    fits: bool  # Whether the other combination fits


def effects(
    best: Candidate, fitting: Sequence[Candidate], over: Sequence[Candidate]
) -> list[Effect]:
    """Compare the best with every predicted combination that differs in one setting."""
    settings = _settings(best.config)
    ordered = []
    for fits, others in ((True, fitting), (False, over)):
        for other in others:
            other_settings = _settings(other.config)
            changed = [key for key in KEYS if settings[key] != other_settings[key]]
            if "mesh.pp_size" in changed:  # decides on the number of micro-batches
                changed = [key for key in changed if key not in PIPELINE[1:]]
            if len(changed) == 1:
                key = changed[0]
                effect = Effect(
                    f"{key}={value_text(settings[key])}",
                    value_text(other_settings[key]),
                    other.reserved_bytes - best.reserved_bytes,
                    best.prediction.time.step_seconds
                    - other.prediction.time.step_seconds,
                    best.tokens_per_second / other.tokens_per_second - 1,
                    fits,
                )
                ordered.append((KEYS.index(key), effect))
    return [effect for _, effect in sorted(ordered, key=lambda pair: pair[0])]


def _settings(config: Config) -> dict[str, Any]:
    """Values of ``KEYS``; those without effect are None."""
    settings = {key: read(config, key) for key in KEYS}
    if not config.memory.cpu_offload:
        settings["memory.cpu_offload_executor"] = None
    if not config.parallel.capabilities.shards_parameters:
        settings |= {
            key: None for key in ("parallel.wrap", "parallel.reshard_after_forward")
        }
    return settings
