"""All tests of this folder run on simulated NPUs, whose extension is built before the first."""

import shutil

import pytest

from tests.simulated_npu.ranks import build_extension


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, for ``pytest -m npu``."""
    for item in items:
        if "simulated_npu" in item.path.parts:
            item.add_marker(pytest.mark.npu)


@pytest.fixture(scope="session", autouse=True)
def extension() -> None:
    """Built once, not by each of the ranks that want it; skips where there is nothing to build it with."""
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"simulated NPUs are built with {' and '.join(missing)}, not installed here")
    build_extension()
