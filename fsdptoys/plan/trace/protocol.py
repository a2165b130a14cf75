"""TODO."""

import pickle
from pathlib import Path

from fsdptoys.errors import ConfigError
from fsdptoys.plan.simulator.events import Trace

REQUEST = "request.pickle"


def answer_name(index: int) -> str:
    """The file with the answer for a depth."""
    return f"answer-{index}.pickle"


def read_answer(folder: Path, index: int, told: str) -> Trace:
    """The trace that a worker wrote, or its failure.

    Args:
        folder: of the request.
        index: of the depth.
        told: what the process wrote to its standard error.
    """
    try:
        with open(folder / answer_name(index), "rb") as file:
            answer = pickle.load(file)
    except FileNotFoundError:
        if not told.strip():
            raise ConfigError(
                "the trace was killed before its end, most likely for want of host memory; set plan.exact=false, or "
                "free memory"
            ) from None
        raise RuntimeError(f"the process that traces ended without an answer:\n{told}") from None
    if isinstance(answer, Trace):
        return answer
    kind, message = answer
    raise kind(message)
