"""Rotary frequencies, and their scaling to longer contexts.

Sources: arXiv:2104.09864; ``llama3`` is arXiv:2407.21783's scaling, ``yarn`` arXiv:2309.00071's,
``linear`` divides all frequencies (arXiv:2306.15595). Frequencies have the bits of transformers'
``modeling_rope_utils``. Not covered: ``dynamic`` and ``longrope``, whose frequencies depend on the
length of a call.

Shapes: K width of a head.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from .checks import MOST_TOKENS, above, at_least, check_bounds

LATER = {"later": True}
"""Metadata of a field that files of earlier versions lack."""


class RopeKind(Enum):
    """A scaling of rotary frequencies."""

    llama3 = "llama3"
    """Stretches long wavelengths, keeps short ones, and mixes those between."""
    linear = "linear"
    """Stretches all wavelengths alike."""
    yarn = "yarn"
    """Stretches channels that turn rarely, and scales cosines and sines."""


@dataclass
class RopeScaling:
    """Stretching of rotary frequencies to a longer context."""

    factor: float = field(default=1.0, metadata=at_least(1, 1e30))
    """Stretch of the low frequencies' wavelengths; 1 switches scaling off."""
    low_freq_factor: float = field(default=1.0, metadata=above(0, 1e30))
    """With kind=llama3: wavelengths above ``original_max_seq_len / low_freq_factor`` are stretched
    in full."""
    high_freq_factor: float = field(default=4.0, metadata=above(0, 1e30))
    """With kind=llama3: wavelengths below ``original_max_seq_len / high_freq_factor`` stay as they
    are."""
    original_max_seq_len: int = field(default=8192, metadata=at_least(1, MOST_TOKENS))
    """Context length of the pre-training, in tokens; kind=linear does not use it."""
    kind: RopeKind = field(default=RopeKind.llama3, metadata=LATER)
    """llama3, linear (arXiv:2306.15595) or yarn (arXiv:2309.00071)."""
    beta_fast: float = field(default=32.0, metadata=above(0, 1e30) | LATER)
    """With kind=yarn: channels that turn more often in the original context stay as they are."""
    beta_slow: float = field(default=1.0, metadata=above(0, 1e30) | LATER)
    """With kind=yarn: channels that turn less often are stretched in full."""
    attention_factor: float | None = field(
        default=None, metadata=above(0, 1e30) | LATER
    )
    """With kind=yarn: scale of cosines and sines; null for 0.1·ln(factor) + 1."""
    truncate: bool = field(default=True, metadata=LATER)
    """With kind=yarn: round the bounds of the mixed channels to whole channels."""

    def __post_init__(self) -> None:
        check_bounds(self, "rope_scaling.")
        if self.low_freq_factor > self.high_freq_factor:
            raise ValueError(
                f"model.rope_scaling.high_freq_factor={self.high_freq_factor} must be at least "
                f"model.rope_scaling.low_freq_factor={self.low_freq_factor}; "
                f"set model.rope_scaling.high_freq_factor={4 * self.low_freq_factor}"
            )
        if self.beta_slow > self.beta_fast:
            raise ValueError(
                f"model.rope_scaling.beta_fast={self.beta_fast} must be at least "
                f"model.rope_scaling.beta_slow={self.beta_slow}; "
                f"set model.rope_scaling.beta_fast={32 * self.beta_slow}"
            )

        if self.factor == 1 and self.kind is not RopeKind.llama3:
            raise ValueError(
                f"model.rope_scaling.kind={self.kind.value} has no effect with "
                "model.rope_scaling.factor=1.0; set model.rope_scaling.factor=4"
            )
        for name in ("beta_fast", "beta_slow", "attention_factor", "truncate"):
            value = getattr(self, name)
            if self.kind is not RopeKind.yarn and value != getattr(RopeScaling, name):
                raise ValueError(
                    f"model.rope_scaling.{name}={str(value).lower()} has no effect with "
                    f"model.rope_scaling.kind={self.kind.value}; "
                    "set model.rope_scaling.kind=yarn"
                )

    def uses(self, key: str) -> bool:
        """Whether a setting changes the frequencies."""
        if self.factor == 1:
            return key == "factor"
        return key in ("factor", "kind", *_KEYS[self.kind])

    @property
    def table_factor(self) -> float:
        """Scale of cosines and sines."""
        if self.kind is not RopeKind.yarn:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return yarn_magnitude(self.factor)


_KEYS = {
    RopeKind.llama3: {
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_seq_len": "original_max_position_embeddings",
    },
    RopeKind.linear: {},
    RopeKind.yarn: {
        "original_max_seq_len": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
    },
}
"""Kind → its settings besides the factor → their keys in ``config.json``."""


def rope_inv_freq(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Rotary frequencies in radians a token, float32, shape (K/2,), with the scaling applied."""
    pos_freq = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    inv_freq = 1.0 / pos_freq
    if scaling.factor == 1:
        return inv_freq
    if scaling.kind is RopeKind.linear:
        return inv_freq / scaling.factor
    if scaling.kind is RopeKind.yarn:
        share = _kept_share(head_dim, theta, scaling)
        return 1.0 / (scaling.factor * pos_freq) * (1 - share) + inv_freq * share
    return _stretch_long_waves(inv_freq, scaling)


def _stretch_long_waves(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    wavelength = 2 * math.pi / inv_freq
    longest = scaling.original_max_seq_len / scaling.low_freq_factor
    shortest = scaling.original_max_seq_len / scaling.high_freq_factor
    scaled = torch.where(wavelength > longest, inv_freq / scaling.factor, inv_freq)
    if longest == shortest:
        return scaled
    unscaled_share = (
        scaling.original_max_seq_len / wavelength - scaling.low_freq_factor
    ) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (
        1 - unscaled_share
    ) * inv_freq / scaling.factor + unscaled_share * inv_freq
    return torch.where(
        (wavelength <= longest) & (wavelength >= shortest), between, scaled
    )


def _kept_share(head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """Share of each frequency that yarn keeps: 1 for channels that turn often, 0 for others."""

    def channel(turns: float) -> float:
        """The channel that turns so often in the original context."""
        wavelength = scaling.original_max_seq_len / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low = channel(scaling.beta_fast)
    high = channel(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    if low == high:
        high += 0.001
    channels = torch.arange(head_dim // 2, dtype=torch.float32)
    return 1 - torch.clamp((channels - low) / (high - low), 0, 1)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """Scale of cosines and sines for a stretch by ``factor``."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def write_scaling(scaling: RopeScaling) -> dict[str, Any] | None:
    """``rope_scaling`` of ``config.json``; None without scaling."""
    if scaling.factor == 1:
        return None
    values = {
        key: getattr(scaling, name)
        for name, key in _KEYS[scaling.kind].items()
        if getattr(scaling, name) is not None
    }
    return {"rope_type": scaling.kind.value, "factor": scaling.factor, **values}


def read_scaling(
    section: Mapping[str, Any], max_seq_len: int, owner: str
) -> RopeScaling:
    """Read ``rope_scaling`` or ``rope_parameters`` of ``config.json`` as transformers does.

    Args:
        section: its keys.
        max_seq_len: yarn's original context, if the section names none.
        owner: ``model_type``, for messages.

    Raises:
        ValueError: for a scaling that is not computed, or without its settings.
    """
    word = section.get("rope_type", section.get("type", "default"))
    if section.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(
            f"config.json says partial_rotary_factor={section['partial_rotary_factor']!r}, which "
            f"{owner} models here do not compute (only 1)"
        )
    if word == "default":
        return RopeScaling()
    if word not in [kind.value for kind in RopeKind]:
        kinds = ", ".join(repr(kind.value) for kind in RopeKind)
        raise ValueError(
            f"config.json says rope_type={word!r}, which {owner} models here do not compute "
            f"(only 'default', {kinds})"
        )
    kind = RopeKind(word)
    values = dict(section)
    if kind is RopeKind.yarn:
        values = _complete_yarn(values, max_seq_len)
    keys = {"factor": "factor", **_KEYS[kind]}
    missing = [
        key
        for key in keys.values()
        if values.get(key) is None and key != "attention_factor"
    ]
    if missing:
        raise ValueError(f"config.json lacks {missing[0]} in its rotary scaling")
    if values["factor"] == 1:
        attention_factor = values.get("attention_factor")
        if kind is RopeKind.yarn and attention_factor not in (None, 1):
            raise ValueError(
                f"config.json says attention_factor={attention_factor!r} with factor=1, which "
                f"{owner} models here do not compute"
            )
        return RopeScaling()
    settings = {name: values[key] for name, key in keys.items()}
    return RopeScaling(kind=kind, **settings)


def _complete_yarn(section: Mapping[str, Any], max_seq_len: int) -> dict[str, Any]:
    """Fill in what transformers does, which takes a null, or a 0 of some keys, as missing."""
    values = dict(section)
    values.setdefault("original_max_position_embeddings", max_seq_len)
    values["beta_fast"] = values.get("beta_fast") or 32.0
    values["beta_slow"] = values.get("beta_slow") or 1.0
    values.setdefault("truncate", True)
    values.setdefault("attention_factor", None)
    weights = values.get("mscale"), values.get("mscale_all_dim")
    if values["attention_factor"] is None and all(weights) and "factor" in values:
        numerator, denominator = (
            yarn_magnitude(values["factor"], weight) for weight in weights if weight
        )
        values["attention_factor"] = numerator / denominator
    return values
