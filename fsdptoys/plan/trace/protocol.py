"""Files through which a planner asks a child process for traces."""

import pickle
from pathlib import Path

from fsdptoys.errors import ConfigError
from fsdptoys.plan.simulator.events import Trace

REQUEST = "request.pickle"


def answer_name(index: int) -> str:
    """The answer's file name for a depth."""
    return f"answer-{index}.pickle"


def read_answer(folder: Path, index: int, stderr: str) -> Trace:
    """The child's trace, or its failure as an exception."""
    try:
        with open(folder / answer_name(index), "rb") as file:
            answer = pickle.load(file)
    except FileNotFoundError:
        if not stderr.strip():
            raise ConfigError(
                "the trace was killed before its end, most likely for lack of host memory; set plan.exact=false, or "
                "free memory"
            ) from None
        raise RuntimeError(f"the tracing process ended without an answer:\n{stderr}") from None
    if isinstance(answer, Trace):
        return answer
    kind, message = answer
    raise kind(message)
