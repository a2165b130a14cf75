"""The CPU device and its count of tensors' bytes, and properties of other devices by name."""

import functools
import importlib.util
import os
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdptoys.config.compose import compose_config
from fsdptoys.device import (
    AllocationCount,
    CountedBytes,
    Device,
    available_device_type,
    device_count,
    float64_collectives,
    in_host_place,
    peak_flops,
)
from fsdptoys.errors import ConfigError
from fsdptoys.train.distributed import device_of
from fsdptoys.train.random_states import random_states, restore_random_states
from tests.harness.ranks import run_ranks

KIB = 2**10


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA H800 PCIe", 756e12),
        ("NVIDIA GB200", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Ascend910B3", 313e12),
        ("Ascend910_9362", None),
    ],
)
def test_peak_flops_are_found_by_name(name: str, expected: float | None) -> None:
    """Oracle: NVIDIA's data sheets and Huawei's figure, dense bf16."""
    assert peak_flops(name) == expected


def test_cpu_device_is_the_system() -> None:
    """Oracle: the operating system's own numbers; PyTorch's own generator is the CPU's."""
    device = Device("cpu")
    assert (device.backend, device.torch_device, device.is_accelerator) == (
        "gloo",
        torch.device("cpu"),
        False,
    )
    assert (device.bound_device, device.barrier_devices, device.pins_memory) == (
        None,
        None,
        False,
    )
    assert device.name and device.peak_flops is None and device.supports_bfloat16()
    device.synchronize()
    device.reset_peak_memory()
    assert device.total_memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf(
        "SC_PHYS_PAGES"
    )
    assert device.rng_state() is None
    device.restore_rng_state(torch.zeros(16, dtype=torch.uint8))


WITHOUT = pytest.mark.skipif(
    available_device_type() != "cpu", reason="has an accelerator"
)


@WITHOUT
def test_missing_device_is_a_config_error() -> None:
    """Oracle: the expected message."""
    assert device_count("cuda") == 0 and device_count("cpu") == 1
    with pytest.raises(
        ConfigError,
        match=r"^launch.device=cuda finds no such device.*; set launch.device=cpu$",
    ):
        Device("cuda", 0)


@WITHOUT
@pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is not None, reason="has torch_npu"
)
def test_missing_torch_npu_names_the_package_to_install() -> None:
    """Oracle: torch_npu's wheels; each requires the PyTorch of its own version."""
    release = torch.__version__.partition("+")[0]
    needs = "^launch.device=npu needs torch_npu, which is not installed; pip install "
    sentence = rf"{needs}'torch_npu=={release}\.\*'"
    with pytest.raises(ConfigError, match=sentence):
        Device("npu")


BROKEN_PACKAGE = (
    "raise ImportError('libhccl.so: cannot open shared object file: No such "
    "file or directory')"
)
NOT_IMPORTED = (
    r"installed but cannot be imported \[libhccl.so: cannot open.*\]; "
    "install CANN and source its set_env.sh"
)
NO_DEVICE = (
    "finds no device, although torch_npu is loaded: does npu-smi info list one, was CANN's "
    "set_env.sh sourced, does "
    r"ASCEND_RT_VISIBLE_DEVICES=5 name an existing device\? Or set launch.device=cpu$"
)


@WITHOUT
@pytest.mark.parametrize(
    "source, sentence",
    [
        (BROKEN_PACKAGE, NOT_IMPORTED),
        ("import torch, types; torch.npu = types.SimpleNamespace()", NO_DEVICE),
    ],
)
def test_failed_torch_npu_import_or_missing_npus_are_reported(
    source: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the expected message, for a package of that name that fails to import or finds no
    device."""
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
    monkeypatch.setattr(
        torch,
        "device",
        lambda kind, index=None: types.SimpleNamespace(type=kind, index=index),
    )
    return module


def test_npu_uses_hccl_without_a_bound_device(fake_npus: types.SimpleNamespace) -> None:
    """Oracle: torch_npu 2.13.0; its process group has no way to split one."""
    device = Device("npu", 1)
    assert (device.backend, device.bound_device, device.barrier_devices) == (
        "hccl",
        None,
        [1],
    )
    assert (
        device.is_accelerator and device.pins_memory and not float64_collectives("npu")
    )
    with pytest.raises(
        ConfigError,
        match=r"local rank 2 needs its own npu device, this machine has 2; set launch",
    ):
        Device("npu", 2)


def test_bfloat16_is_refused_on_devices_without_support(
    fake_npus: types.SimpleNamespace,
) -> None:
    """Oracle: the device's own answer."""
    config = compose_config(
        ["launch.device=npu", "parallel=fsdp2", "parallel.param_dtype=bfloat16"]
    )
    with pytest.raises(
        ConfigError,
        match=r"=bfloat16 cannot run on Ascend910A number 0, which has no bfloat16; set",
    ):
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


def kib(count: int) -> Tensor:
    return torch.empty(count * KIB, dtype=torch.uint8)


def test_peak_and_split_are_those_counted_by_hand() -> None:
    """Oracle: 8 + 4 before; +16, −16, +5 (a gradient), −4 (from before), +7, −7: the highest sum is
    8 + 4 + 16."""
    parameters = [kib(8)]
    old = [kib(4)]
    count = AllocationCount({"parameters": parameters})
    kib(16)
    gradient = kib(5)
    count.label({"gradients": [gradient]})
    old.clear()
    kib(7)
    counted = count.finish({"states": [kib(1)]})
    rest = counted.before_bytes - 8 * KIB
    assert counted.peak_bytes - counted.before_bytes == 16 * KIB
    assert counted.at_peak == {"parameters": 8 * KIB, "rest": rest + 16 * KIB}
    assert counted.end_bytes - counted.before_bytes == (5 - 4 + 1) * KIB


def test_host_copies_are_counted_apart() -> None:
    """Oracle: by hand: 24 and 40 in the host's place; the 40 by their purpose."""
    offloaded = in_host_place(kib(24))
    states = kib(40)
    parameters = kib(8)
    count = AllocationCount(
        {"states": [states], "parameters": [parameters]}, host_purposes=["states"]
    )
    counted = count.finish({})
    assert counted.host_bytes == offloaded.nbytes + states.nbytes
    assert (
        counted.at_peak["parameters"] == parameters.nbytes
        and "states" not in counted.at_peak
    )


def test_backward_and_views_are_counted_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Oracle: gradients of two matrices by hand, both views of one buffer; no warning is
    printed."""
    buffer = torch.zeros(2, 64, 64)
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(2)]
    for weight, view in zip(weights, buffer, strict=True):
        weight.grad = view
    count = AllocationCount({"parameters": weights})
    (weights[0] @ weights[1]).relu().sum().backward()
    count.label(
        {"gradients": [weight.grad for weight in weights if weight.grad is not None]}
    )
    counted = count.finish({})
    assert counted.at_peak["gradients"] == buffer.nbytes
    assert counted.at_peak["parameters"] == 2 * 64 * 64 * 4
    assert counted.end_bytes == counted.before_bytes
    # The forward keeps the product and its relu; the backward has the scalar's gradient spread over
    # 64 × 64.
    assert counted.peak_bytes - counted.before_bytes >= 3 * 64 * 64 * 4
    # Kineto reads its level once: if another test has used it before, its own lines remain.
    assert all(line.startswith("USDT:") for line in capfd.readouterr().err.splitlines())


def gathered() -> tuple[CountedBytes, int]:
    shards = [torch.ones(1000) for _ in range(2)]
    count = AllocationCount({})
    torch.distributed.all_gather(shards, torch.ones(1000))
    whole = torch.ones(3000)
    return count.finish({}), whole.nbytes


def test_buffers_of_collectives_are_seen() -> None:
    """Oracle: the tensors of the test; gloo's copies come on top of the contribution."""
    for counted, whole in run_ranks(2, gathered):
        assert counted.end_bytes - counted.before_bytes >= whole
        assert counted.peak_bytes - counted.before_bytes >= max(whole, 3 * 4000)


def test_only_memory_that_pytorch_allocated_is_counted() -> None:
    """Oracle: 3 KiB of PyTorch's, beside a tensor on NumPy's memory, one without memory, and a
    second view."""
    before = AllocationCount({}).finish({}).before_bytes
    tensors = [kib(3), torch.from_numpy(np.zeros(9)), torch.empty(0)]
    tensors.append(tensors[0].view(3, KIB))
    assert AllocationCount({}).finish({}).before_bytes - before == 3 * KIB


def test_a_cpu_has_memory_once_counted() -> None:
    """Oracle: the counted numbers; the higher of two peaks stays until the reset."""
    device = Device("cpu")
    assert device.memory() is None
    device.record(CountedBytes(0, 5, 90, {"rest": 90}, 0))
    device.record(CountedBytes(0, 7, 30, {"rest": 30}, 2))
    memory = device.memory()
    assert memory is not None and memory[:3] == (7, 90, None)
    assert (memory.at_peak, memory.host_bytes) == ({"rest": 90}, 2)
    device.reset_peak_memory()
    assert device.memory() is None


def test_ends_of_earlier_blocks_lower_later_peaks() -> None:
    """Oracle: by hand: a block of 32 from before ends first, so that 20 more stay below the
    start."""
    blocks = [kib(32)]
    count = AllocationCount({})
    blocks.clear()
    later = kib(20)
    counted = count.finish({"gradients": [later]})
    assert counted.peak_bytes == counted.before_bytes
    assert counted.end_bytes == counted.before_bytes - 12 * KIB


def test_fake_copies_of_a_planned_run_are_left_out() -> None:
    """Oracle: no warning about their missing addresses."""
    with FakeTensorMode():
        planned = in_host_place(torch.zeros(10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert AllocationCount({}).finish({}).host_bytes == 0
    assert planned.numel() == 10
