"""Mistral: Llama's blocks, with grouped keys and an independent head width.

Source: arXiv:2310.06825. Tested against transformers' MistralForCausalLM
(``tests/models/test_families.py``). Not covered: sliding windows (the first release, v0.1, has
one; later ones have none), dropout.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .rotary import RotaryConfig, RotaryFormat

WINDOW = 4096
"""transformers' window where ``config.json`` names none."""


@dataclass(frozen=True)
class MistralFormat(RotaryFormat):
    """A window has to be switched off by name."""

    def write_config(self, config: Any) -> dict[str, Any]:
        """``config.json`` without a window."""
        return super().write_config(config) | {"sliding_window": None}

    def read_config(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of our configuration.

        Raises:
            ValueError: also for a window, or none named, since its default is one.
        """
        window = tree.get("sliding_window", WINDOW)
        if window is not None:
            default = "" if "sliding_window" in tree else " by default"
            raise ValueError(
                f"config.json says sliding_window={window!r}{default}, which mistral models here "
                "do not compute (only None)"
            )
        return super().read_config(tree)


@dataclass
class MistralConfig(RotaryConfig):
    """A Mistral model."""

    family: ClassVar[str] = "mistral"
    hugging_face: ClassVar[RotaryFormat] = MistralFormat(
        architecture="MistralForCausalLM",
        model_type="mistral",
        fixed={"hidden_act": "silu"},
    )

    name: str = "mistral"
