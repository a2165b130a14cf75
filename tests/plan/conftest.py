"""Forks in place of the interpreters in which plans trace."""

from collections.abc import Iterator

import pytest

from fsdptoys.plan.trace import tracing_process
from tests.harness import full_trace
from tests.harness.plan_processes import ForkedWorker, Zygote, run_tracer, zygotes


@pytest.fixture(scope="session", autouse=True)
def zygote(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork the zygote of a module before its first test; a run without forks has computed by then,
    and gets none."""
    if request.config.option.workers == 0:
        yield
        return
    zygotes.append(Zygote())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(full_trace, "run_tracer", run_tracer)
        patch.setattr(tracing_process, "start_worker", ForkedWorker)
        yield
    zygotes.pop().close()
