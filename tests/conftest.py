"""Fixtures, options and hooks of all tests."""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.clean_process import clean_process
from tests.harness.coverage import without_coverage
from tests.harness.workers import WorkersPlugin

SLOW = (
    "layout_mode",
    "equality",
    "test_estimate.py",
    "simulated_npu/test_command_line",
    "test_hosts",
    "simulated_npu/test_training",
    "docs/test_commands",
    "checkpointed_collectives",
    "messages",
    "absurd_values",
    "test_context.py",
    "test_state.py",
    "step_readings",
    "expert_parallelism",
    "parity_layouts",
    "test_tracer",
    "parallel/test_toys",
    "pipeline_estimate",
    "simulated_npu/test_fused_adamw",
    "real_allocations",
    "test_faults",
    "test_kills",
    "toys/test_fsdp.py",
    "simulated_npu/test_patches",
)
"""Modules to start first, so that none of them is left alone at the end."""

clean_process()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add this suite's options."""
    group = parser.getgroup("fsdptoys")
    group.addoption(
        "--all", action="store_true", help="also run the tests marked extended"
    )
    group.addoption(
        "--workers",
        type=int,
        default=(os.cpu_count() or 1) + 1,
        help="modules at a time; 0: no forks",
    )
    group.addoption(
        "--times",
        type=Path,
        metavar="FILE",
        help="append CPU s, wall s and name of every test to FILE",
    )
    group.addoption(
        "--update",
        action="store_true",
        help="rewrite tests/messages/messages.yaml from the answers",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Run the tests in forks, unless a debugger needs them here."""
    if config.option.workers and not config.option.usepdb:
        times = (
            config.option.times and config.invocation_params.dir / config.option.times
        )
        config.pluginmanager.register(WorkersPlugin(config.option.workers, SLOW, times))


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out the extended tests, without ``--all``."""
    if not config.option.all:
        extended = [item for item in items if item.get_closest_marker("extended")]
        config.hook.pytest_deselected(items=extended)
        items[:] = [item for item in items if not item.get_closest_marker("extended")]


def pytest_collection_finish() -> None:
    """Compose once, since the first time takes longest, and exempt objects from garbage collection,
    which copies pages."""
    from fsdptoys.config.compose import compose_config

    with contextlib.suppress(Exception):  # a test will say why
        compose_config([])
    gc.collect()
    gc.freeze()


@pytest.fixture
def unmeasured() -> Iterator[None]:
    """Run the test and its processes without coverage, which slows them down; other tests cover the
    same lines."""
    with without_coverage():
        yield


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace ``python -m`` processes of the test and of its launchers by forks with the imports
    already done."""
    from tests.harness.warm_processes import start_warm

    start_warm(monkeypatch)
