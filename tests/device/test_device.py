"""The CPU device, and properties of other devices by name."""

import functools
import importlib.util
import math
import os
import sys
import types
from pathlib import Path

import pytest
import torch

from fsdptoys.config.compose import compose_config
from fsdptoys.device import (
    Device,
    available_device_type,
    device_count,
    float64_collectives,
    peak_flops,
    resident_set_bytes,
)
from fsdptoys.errors import ConfigError
from fsdptoys.train.distributed import device_of
from fsdptoys.train.random_states import random_states, restore_random_states


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA H800 PCIe", 756e12),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GB200", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("some other device", None),
        ("Ascend910B3", 313e12),
        ("Ascend910B2", None),
        ("Ascend910_9362", None),
    ],
)
def test_peak_flops_are_found_by_name(name: str, expected: float | None) -> None:
    """Oracle: NVIDIA's data sheets and Huawei's figure, dense bf16."""
    assert peak_flops(name) == expected


def test_cpu_device_has_no_known_peak() -> None:
    """Oracle: the operating system's own numbers."""
    device = Device("cpu")
    assert (device.backend, device.torch_device, device.is_accelerator) == ("gloo", torch.device("cpu"), False)
    assert device.name and device.peak_flops is None
    device.synchronize()
    device.reset_peak_memory()
    assert device.total_memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_resident_set_grows_by_the_touched_memory() -> None:
    """Oracle: 64 MiB of ones."""
    before = resident_set_bytes()
    ones = torch.ones(2**24)
    assert math.isclose(resident_set_bytes() - before, ones.nbytes, rel_tol=0.2)


WITHOUT = pytest.mark.skipif(available_device_type() != "cpu", reason="has an accelerator")


@WITHOUT
def test_missing_device_is_a_config_error() -> None:
    """Oracle: the expected message."""
    assert device_count("cuda") == 0 and device_count("cpu") == 1
    with pytest.raises(ConfigError, match=r"^launch.device=cuda finds no such device.*; set launch.device=cpu$"):
        Device("cuda", 0)


@WITHOUT
@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="has torch_npu")
def test_missing_torch_npu_names_the_package_to_install() -> None:
    """Oracle: torch_npu's wheels, each of which requires the PyTorch of its own version."""
    release = torch.__version__.partition("+")[0]
    sentence = rf"^launch.device=npu needs torch_npu, which is not installed; pip install 'torch_npu=={release}\.\*'"
    with pytest.raises(ConfigError, match=sentence):
        Device("npu")


BROKEN_PACKAGE = "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')"
NOT_IMPORTED = r"installed but cannot be imported \[libhccl.so: cannot open.*\]; install CANN and source its set_env.sh"
NO_DEVICE = (
    r"finds no device, although torch_npu is loaded: does npu-smi info list one, was CANN's set_env.sh sourced, does "
    r"ASCEND_RT_VISIBLE_DEVICES=5 name an existing device\? Or set launch.device=cpu$"
)


@WITHOUT
@pytest.mark.parametrize(
    "source, sentence",
    [(BROKEN_PACKAGE, NOT_IMPORTED), ("import torch, types; torch.npu = types.SimpleNamespace()", NO_DEVICE)],
)
def test_failed_torch_npu_import_or_missing_npus_are_reported(
    source: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the expected message, for a package of that name that fails to import or finds no device."""
    (tmp_path / "torch_npu.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "5")
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setattr(torch, "npu", None, raising=False)
    monkeypatch.delattr(torch, "npu")
    try:
        with pytest.raises(ConfigError, match=sentence):
            Device("npu")
    finally:
        sys.modules.pop("torch_npu", None)


@pytest.fixture
def fake_npus(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Two NPUs without computation nor bfloat16, as a device module."""
    module = types.SimpleNamespace(bf16=False, state=torch.arange(8, dtype=torch.uint8))
    module.is_bf16_supported = lambda: module.bf16
    module.get_device_name = lambda index: f"Ascend910A number {index}"
    module.get_rng_state = lambda: module.state.clone()
    module.set_rng_state = functools.partial(setattr, module, "state")
    accelerator = types.SimpleNamespace(
        current_accelerator=lambda check_available: torch.device("npu"),
        device_count=lambda: 2,
        set_device_index=lambda index: None,
    )
    monkeypatch.setattr(torch, "npu", module, raising=False)
    monkeypatch.setattr(torch, "accelerator", accelerator)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch, "device", lambda kind, index=None: types.SimpleNamespace(type=kind, index=index))
    return module


def test_npu_uses_hccl_without_a_bound_device(fake_npus: types.SimpleNamespace) -> None:
    """Oracle: torch_npu 2.13.0, whose process group has no way to split one."""
    device = Device("npu", 1)
    assert (device.backend, device.bound_device, device.barrier_devices) == ("hccl", None, [1])
    assert device.is_accelerator and device.pins_memory and not float64_collectives("npu")
    with pytest.raises(ConfigError, match=r"local rank 2 needs its own npu device, this machine has 2; set launch"):
        Device("npu", 2)


def test_cpu_uses_gloo_and_has_no_device_generator() -> None:
    """Oracle: PyTorch's own generator is the CPU's."""
    device = Device("cpu")
    assert (device.backend, device.bound_device, device.barrier_devices) == ("gloo", None, None)
    assert not device.pins_memory
    assert device.rng_state() is None and device.supports_bfloat16()
    device.restore_rng_state(torch.zeros(16, dtype=torch.uint8))


def test_bfloat16_is_refused_on_devices_without_support(fake_npus: types.SimpleNamespace) -> None:
    """Oracle: the device's own answer."""
    config = compose_config(["launch.device=npu", "parallel=fsdp2", "parallel.param_dtype=bfloat16"])
    with pytest.raises(ConfigError, match=r"=bfloat16 cannot run on Ascend910A number 0, which has no bfloat16; set"):
        device_of(config)
    fake_npus.bf16 = True
    assert device_of(config).type == "npu"


def test_device_generator_state_is_restored(fake_npus: types.SimpleNamespace) -> None:
    """Oracle: the state itself."""
    device = Device("npu")
    facts = random_states(device)
    fake_npus.state = torch.zeros(8, dtype=torch.uint8)
    assert restore_random_states(facts, device, seed=0, step=1, rank=0) is None
    assert torch.equal(fake_npus.state, torch.arange(8, dtype=torch.uint8))
