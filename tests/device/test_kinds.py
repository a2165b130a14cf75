"""The table of device types, to which a new accelerator adds one row."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import fsdptoys

ROW = """KINDS = {
    "xpu": Kind(
        "xccl",
        attention_backends=("flash", "math"),
        peak_flops={"Max 1550": 8e14},
        device_memory_errors=("XPU out of memory",),
        deterministic_variables={"CCL_DETERMINISTIC": "1"},
        recorded_variables=("ZE_AFFINITY_MASK",),
    ),"""

PROGRAM = """
import pytest
from fsdptoys.config.compose import compose_config
from fsdptoys.device import Device, device_environment, peak_flops
from fsdptoys.errors import ConfigError
from fsdptoys.metrics.run_environment import environment
from fsdptoys.profiler import is_out_of_memory

def validate(*overrides):
    overrides = ["launch.device=xpu", "parallel=fsdp2", *overrides]
    compose_config(overrides).validate(1, "xpu")

validate()
validate("kernels.attention=flash")
for override in ("kernels.attention=cudnn", "train.float8=tensorwise", "kernels.rotary=npu"):
    with pytest.raises(ConfigError, match=f"^{override} .*launch.device=xpu"):
        validate(override)
with pytest.raises(ConfigError, match="^launch.device=xpu finds no such device"):
    Device("xpu")
assert peak_flops("Intel(R) Data Center GPU Max 1550") == 8e14
assert device_environment("xpu", True, 600.0, {}) == {"CCL_DETERMINISTIC": "1"}
assert is_out_of_memory(RuntimeError("XPU out of memory. Tried to allocate 1.00 GiB"))
assert "ZE_AFFINITY_MASK" in environment(Device("cpu"), 1, [])["environment_variables"]
"""


def test_an_accelerator_is_one_row_of_a_table(tmp_path: Path) -> None:
    """Oracle: a copy of the package with one more row; its checks and records know the device."""
    package = Path(fsdptoys.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, tmp_path / "fsdptoys", ignore=ignored)
    table = tmp_path / "fsdptoys" / "device" / "kinds.py"
    source = table.read_text(encoding="utf-8")
    table.write_text(source.replace("KINDS = {", ROW, 1), encoding="utf-8")
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
