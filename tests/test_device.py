"""The device of a plain CPU, and what is known of others by name."""

import math
import os

import pytest
import torch

from fsdptoys.device import (
    Device,
    available_device_type,
    device_count,
    peak_flops,
    resident_set_bytes,
)
from fsdptoys.errors import ConfigError


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
    ],
)
def test_peak_flops_are_found_by_name(name: str, expected: float | None) -> None:
    """Oracle: NVIDIA's data sheets, dense bf16."""
    assert peak_flops(name) == expected


def test_cpu_device_has_no_known_peak() -> None:
    """Oracle: the operating system's own numbers."""
    device = Device("cpu")
    assert (device.backend, device.torch_device, device.is_accelerator) == ("gloo", torch.device("cpu"), False)
    assert device.name and device.peak_flops is None
    device.synchronize()
    device.reset_peak_memory()
    assert device.total_memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_resident_set_grows_by_what_is_touched() -> None:
    """Oracle: 64 MiB of ones."""
    before = resident_set_bytes()
    held = torch.ones(2**24)
    assert math.isclose(resident_set_bytes() - before, held.nbytes, rel_tol=0.2)


@pytest.mark.skipif(available_device_type() != "cpu", reason="has an accelerator")
def test_a_device_that_is_not_there_is_a_config_error() -> None:
    """Oracle: the sentence."""
    assert device_count("cuda") == 0 and device_count("cpu") == 1
    with pytest.raises(ConfigError, match="local rank 0 needs its own cuda device, this machine has 0"):
        Device("cuda", 0)
