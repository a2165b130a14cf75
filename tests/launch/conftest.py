"""Launchers for the tests of this folder."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launchers import WORKER, Launched, launch


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Any]:
    """Start ``run_workers`` in a separate process; its remains are killed at the end."""
    (tmp_path / "toy_worker.py").write_text(WORKER)
    processes = []

    def start(how: str, ranks: int = 2, **options: Any) -> Launched:
        process = multiprocessing.get_context("fork").Process(target=launch, args=(tmp_path, how, ranks, options))
        process.start()
        processes.append(process)
        return Launched(process, tmp_path, ranks)

    yield start
    for process in processes:
        process.kill()
        process.join()
