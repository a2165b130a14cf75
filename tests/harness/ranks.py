"""Ranks of tests and scripts: those of ``fsdptoys.verify.ranks``, without coverage's tracing where
it only costs time."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from fsdptoys.verify import ranks
from fsdptoys.verify.ranks import GROUP_TIMEOUT as GROUP_TIMEOUT


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    device: str = "cpu",
    start: str = "fork",
    prepare: Callable[[], None] | None = None,
) -> list[Any]:
    """Call ``function(*args)`` on every rank of a fresh process group; see
    ``fsdptoys.verify.ranks``."""
    return ranks.run_ranks(
        world_size,
        function,
        *args,
        device=device,
        start=start,
        prepare=functools.partial(_trace_once, prepare),
    )


def _trace_once(prepare: Callable[[], None] | None) -> None:
    """Coverage gets the same lines from rank 0 or another test, and slows down the traced code."""
    measured = any(name.startswith("COVERAGE_PROCESS_") for name in os.environ)
    if os.environ["RANK"] != "0" or not measured:
        sys.settrace(None)
    if prepare is not None:
        prepare()
