"""What tests of several folders ask for."""

import os

import pytest


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreters that the test starts run without coverage, which slows them down: other tests run their lines."""
    for name in [name for name in os.environ if name.startswith("COVERAGE_PROCESS_")]:
        monkeypatch.delenv(name)
