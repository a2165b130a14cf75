"""All tests of this folder run on simulated NPUs; their extension is built before the first."""

import shutil

import pytest
import torch

from fsdptoys.patches.patch import parse_version
from tests.simulated_npu.ranks import build_extension


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests for ``pytest -m npu``; skip them without the build tools of the extension."""
    missing = None
    if shutil.which("g++") is None:
        missing = "g++ is not installed (Debian, Ubuntu: apt install g++)"
    if parse_version(torch.__version__) < (2, 13):
        missing = "the extension is written for the headers of torch 2.13"
    for item in items:
        if "simulated_npu" in item.path.parts:
            item.add_marker(pytest.mark.npu)
            if missing is not None:
                item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session", autouse=True)
def extension() -> None:
    """Build the extension once before the first test, not in each rank."""
    build_extension()
