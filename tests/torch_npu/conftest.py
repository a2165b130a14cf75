"""Our calls of torch_npu, tested against its real wheels, without an NPU or CANN.

``bash scripts/torch_npu_env.sh`` makes the environment, once; ``pytest -m torch_npu`` runs these
tests, which plain ``pytest`` leaves out. There are two kinds:

- ``test_interface.py`` reads the wheels of torch_npu 2.13.0 and 2.7.1 and runs nothing of them:
  every name and parameter that our sources use is there.
- The others run ``fsdptoys train launch.device=npu`` on torch_npu 2.13.0 over a stub of CANN, and
  compare losses and trained weights with ``launch.device=cpu``.

Parts of torch_npu's own in those runs: its import and autoload, allocator with expandable segments
and statistics, memory history, streams, events and task queue, pinned memory, random number states,
``ProcessGroupHCCL`` with its checks of dtypes, the Python around its profiler. Replaced parts:
``cann/`` simulates the runtime, HCCL and the profiler on host memory, and completes every call
before it returns; ``kernels/`` replaces the operators by the CPU's on the same bytes. So a run here
shows that our calls fit torch_npu. It shows nothing of speed, of CANN's kernels and their rounding,
of missing waits, of HCCL between machines; and ``torch.compile`` is not covered.

Its fused operators, the default on an NPU, are turned off except in one test, which computes them
by plain matmuls under torch_npu's own schemas and autograd (``tests/harness/npu_stand_ins.py``).

``STUB_DEVICES`` (2) and ``STUB_DEVICE_MIB`` (16384) set the stub's device count and memory.
"""

import os
from pathlib import Path

import pytest

from tests.torch_npu.environment import sources

FOLDER = Path(
    os.environ.get("TORCH_NPU_ENV", Path(__file__).parents[2] / ".venv-torch-npu")
)


@pytest.fixture(scope="session")
def environment() -> Path:
    """The folder made by ``scripts/torch_npu_env.sh``."""
    mark = FOLDER / "made-from"
    if not mark.exists():
        pytest.skip(f"{FOLDER} is not there: bash scripts/torch_npu_env.sh makes it")
    if mark.read_text() != sources():
        pytest.skip(
            f"{FOLDER} was made from other sources: bash scripts/torch_npu_env.sh makes it again"
        )
    return FOLDER
