"""Coverage, and exemptions from it: measured code takes up to three times as long."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def without_coverage() -> Iterator[None]:
    """Run without coverage, including started processes; only for code that other tests cover."""
    names = [name for name in os.environ if name.startswith("COVERAGE_PROCESS_")]
    trace = sys.gettrace()
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delenv(name)
        if names:  # else a debugger may be at work
            sys.settrace(None)
        try:
            yield
        finally:
            sys.settrace(trace)
