"""Peak FLOP/s of accelerators by device name."""

import re

PEAK_FLOPS = {
    # Dense bf16 FLOP/s with float32 accumulation, from NVIDIA's data sheets (2:1 sparsity taken out).
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "H800": 989e12,
    "H800 PCIe": 756e12,
    "H20": 148e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    # Huawei's figure (jdc.huawei.com, viewthread 1175654): 20 cores × 8,192 FLOP a cycle × 1.91 GHz. The other variants
    # of the 910B differ in cores and clock and have no published figure.
    "Ascend910B3": 313e12,
}
"""Part of the device's name → peak; the longest match counts."""


def peak_flops(device_name: str) -> float | None:
    """Peak dense bf16 FLOP/s of a device; None if unknown."""
    if re.search(r"\b(MIG|Laptop)\b", device_name):
        return None
    known = sorted((words for words in PEAK_FLOPS if re.search(rf"\b{words}\b", device_name)), key=len)
    return PEAK_FLOPS[known[-1]] if known else None
