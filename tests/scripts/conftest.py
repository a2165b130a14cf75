"""No test of this folder is measured: other tests cover the lines of the package that scripts
call."""

import pytest


@pytest.fixture(autouse=True)
def without_measurement(unmeasured: None) -> None:
    """Run every test without coverage."""
