"""Random number generators are restored, or restart from the seed with a reason; none reads foreign
memory."""

import base64
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fsdptoys.device import Device
from fsdptoys.train.random_states import (
    RandomStates,
    random_states,
    restore_random_states,
)
from fsdptoys.utils.foreign import ForeignError
from fsdptoys.utils.from_tree import build

DEVICE = Device("cpu")


def draws() -> list[float]:
    """Draw more numbers of each generator than it buffers."""
    return [
        *(random.random() for _ in range(700)),
        *np.random.random(700).tolist(),
        np.random.standard_normal(),
        *torch.rand(700).tolist(),
    ]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@pytest.mark.parametrize("count", [0, 1, 311, 623, 624, 625])
def test_generators_resume_from_their_saved_states(count: int) -> None:
    """Oracle: the numbers without saving and restoring, from several positions in their arrays."""
    seed_all(5)
    for _ in range(count):
        random.random()
        np.random.standard_normal()
        torch.rand(1)
    states = json.loads(json.dumps(random_states(DEVICE)))
    build(RandomStates, states)
    expected = draws()
    seed_all(6)
    assert restore_random_states(states, DEVICE, seed=0, step=1, rank=0) is None
    assert draws() == expected


def place_torch(start: int, value: int) -> Callable[[dict[str, Any]], None]:
    def edit(states: dict[str, Any]) -> None:
        state = bytearray(base64.b64decode(states["torch"]))
        state[start : start + 4] = value.to_bytes(4, "little")
        states["torch"] = base64.b64encode(state).decode()

    return edit


OTHERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another Python's": (
        lambda states: states["python"].update(version=4),
        "Python's state is of version 4",
    ),
    "a shorter one of Python's": (
        lambda states: states["python"].update(internal=[1, 2]),
        "state vector",
    ),
    "a place beyond Python's": (
        lambda states: states["python"]["internal"].__setitem__(-1, 625),
        "invalid state",
    ),
    "another torch's": (
        lambda states: states.update(torch="AAAA"),
        "torch's state holds 3 bytes, and this version's",
    ),
    "no state of torch": (
        lambda states: states.update(torch=""),
        "torch's state holds 1 bytes",
    ),
    # Torch itself accepts both of these, and reads out of bounds at the next draws.
    "a place at the end of torch's": (
        place_torch(16, 624),
        "numbers left from 624 on, of 624",
    ),
    "too many left of torch's": (
        place_torch(8, 624),
        "624 numbers left from 10 on, of 624",
    ),
    "a place beyond torch's": (place_torch(16, 10**9), "left from 1000000000 on"),
    "an unseeded torch state": (place_torch(12, 0), "mt19937"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_incompatible_states_fall_back_to_the_seed(case: str) -> None:
    """Oracle: the reason, and the numbers of a start without states."""
    edit, reason = OTHERS[case]
    seed_all(7)
    torch.rand(10)
    states = random_states(DEVICE)
    edit(states)
    build(RandomStates, states)
    message = restore_random_states(states, DEVICE, seed=3, step=4, rank=1)
    assert message is not None and reason in message
    numbers = draws()
    assert restore_random_states(None, DEVICE, seed=3, step=4, rank=1) is None
    assert draws() == numbers


OUTSIDE = r"numpy\.position is .*, not an integer from 0 to 624"


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        # numpy accepts such positions, and crashes or returns foreign memory.
        *(
            ("position", position, OUTSIDE)
            for position in (625, -1, 2 * 10**9, 1.0, True, None)
        ),
        ("keys", "AAAA", r"numpy\.keys holds 3 bytes, not 2496"),
        ("keys", "=!", r"numpy\.keys is not text in base 64 \(.*\)"),
        ("has_gauss", 2, r"numpy\.has_gauss is 2, not an integer from 0 to 1"),
        ("cached", float("nan"), r"numpy\.cached is nan, not a finite number"),
    ],
)
def test_invalid_numpy_states_are_refused(
    key: str, value: object, sentence: str
) -> None:
    """Oracle: the expected message."""
    states = random_states(DEVICE)
    states["numpy"][key] = value
    with pytest.raises(ForeignError, match=f"^{sentence}$"):
        build(RandomStates, states)
