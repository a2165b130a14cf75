"""Save and restore the states of this process's random number generators, as JSON in a checkpoint.

Training itself does not draw from them; user-defined models and strategies may. So an incompatible
state, of another Python, torch or device, does not stop a run: the generators then start from the
seed.

numpy and torch accept any position in their array of 624 numbers, and an invalid one makes the next
draw read out of bounds; positions are therefore checked here first.
"""

import base64
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fsdptoys.device import Device
from fsdptoys.utils.bounds import at_least, between, max_length
from fsdptoys.utils.foreign import ForeignError

STATE_NUMBERS = 624
"""Size of the Mersenne Twister's state in numpy, torch and Python."""

LONGEST_STATE = 2**20
"""Maximum length of a state in base64 characters; torch's takes about 7,000."""

TORCH_STATE_BYTES = (5048, 5056)
"""Sizes of the CPU generator's state with the layout that ``_check_torch_state`` knows; tested with
torch 2.13."""


@dataclass
class _NumpyState:
    keys: str = field(metadata=max_length(LONGEST_STATE))
    position: int = field(metadata=between(0, STATE_NUMBERS))
    has_gauss: int = field(metadata=between(0, 1))
    cached: float

    def __post_init__(self) -> None:
        size = len(_decode(self.keys, "numpy.keys"))
        if size != 4 * STATE_NUMBERS:
            raise ForeignError(
                f"numpy.keys holds {size} bytes, not {4 * STATE_NUMBERS}"
            )


@dataclass
class _PythonState:
    version: int = field(metadata=at_least(0))
    internal: list[int] = field(
        metadata=between(0, 2**32 - 1, longest=10 * STATE_NUMBERS)
    )
    gauss: float | None


@dataclass
class RandomStates:
    """Types and ranges of the result of ``random_states``."""

    torch: str = field(metadata=max_length(LONGEST_STATE))
    device: str | None = field(metadata=max_length(LONGEST_STATE))
    numpy: _NumpyState
    python: _PythonState

    def __post_init__(self) -> None:
        """Check that both torch states are valid base64."""
        _decode(self.torch, "torch")
        _decode(self.device or "", "device")


def random_states(device: Device) -> dict[str, Any]:
    """States of this process's random number generators, as JSON values."""
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    own = device.rng_state()
    return {
        "torch": _encode(torch.get_rng_state()),
        "device": None if own is None else _encode(own),
        "numpy": {
            "keys": base64.b64encode(np.asarray(keys, dtype="<u4").tobytes()).decode(),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "python": {"version": version, "internal": list(internal), "gauss": gauss},
    }


def restore_random_states(
    states: dict[str, Any] | None, device: Device, seed: int, step: int, rank: int
) -> str | None:
    """Restore the states from :func:`random_states`, or seed the generators if they are None or
    incompatible.

    The seed is mixed with ``step``, after which the states were saved, and ``rank``. Return the
    reason why the states are incompatible, else None.
    """
    if states is not None:
        try:
            _restore(states, device)
            return None
        # raised by torch, Python and numpy for an invalid state
        except (RuntimeError, TypeError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    mixed = int(
        np.random.SeedSequence(seed, spawn_key=(step, rank)).generate_state(1)[0]
    )
    torch.manual_seed(mixed)  # of all devices
    np.random.seed(mixed)
    random.seed(mixed)
    return reason if states is not None else None


def _restore(states: dict[str, Any], device: Device) -> None:
    own = torch.get_rng_state()
    state = _tensor(states["torch"], "torch")
    if len(state) != len(own):
        raise ValueError(
            f"torch's state holds {len(state)} bytes, and this version's {len(own)}"
        )
    _check_torch_state(state)
    on_device = states["device"]
    python = states["python"]
    numpy = states["numpy"]
    version = random.getstate()[0]
    if python["version"] != version:
        raise ValueError(
            f"Python's state is of version {python['version']}, and this one's of {version}"
        )
    random.setstate((python["version"], tuple(python["internal"]), python["gauss"]))
    torch.set_rng_state(state)
    device.restore_rng_state(
        None if on_device is None else _tensor(on_device, "device")
    )
    keys = np.frombuffer(_decode(numpy["keys"], "numpy.keys"), dtype="<u4")
    np.random.set_state(
        ("MT19937", keys, numpy["position"], numpy["has_gauss"], numpy["cached"])
    )


def _check_torch_state(state: torch.Tensor) -> None:
    """Refuse a position from which torch would read out of bounds; torch checks each field only by
    itself.

    The layout is ATen's ``CPUGeneratorImplStateLegacy``: seed (8 bytes), numbers left before the
    next refill (4), whether it was seeded (4), position of the next number (8), 624 numbers of 8
    bytes, and a cached normal sample.
    """
    if len(state) in TORCH_STATE_BYTES:
        content = state.numpy().tobytes()
        left = int.from_bytes(content[8:12], "little", signed=True)
        following = int.from_bytes(content[16:24], "little")
        if not 0 < left <= STATE_NUMBERS or following + left > STATE_NUMBERS + 1:
            raise ValueError(
                f"torch's state has {left} numbers left from {following} on, of {STATE_NUMBERS}"
            )


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str, key: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ForeignError(f"{key} is not text in base 64 ({error})") from None


def _tensor(text: str, key: str) -> torch.Tensor:
    return torch.frombuffer(
        bytearray(_decode(text, key)) or bytearray(1), dtype=torch.uint8
    )
