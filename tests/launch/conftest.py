"""Launchers for the tests of this folder."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.launchers import Launched, launch
from tests.harness.processes import kill_tree


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Any]:
    """Start ``run_workers`` in a separate process and a new folder; its remains are killed at the
    end."""
    processes: list[Any] = []

    def start(how: str, ranks: int = 2, **options: Any) -> Launched:
        folder = tmp_path / f"launcher{len(processes)}"
        folder.mkdir()
        process = multiprocessing.get_context("fork").Process(
            target=launch, args=(folder, how, ranks, options)
        )
        process.start()
        processes.append(process)
        return Launched(process, folder, ranks)

    yield start
    for process in processes:
        kill_tree(process.pid)
        process.join()
