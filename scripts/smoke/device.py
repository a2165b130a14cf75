"""Checks of the device itself: its memory, its matrix product, and a process group of one rank."""

import importlib.metadata
import importlib.util
import os
import shutil

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptoys.config.compose import compose_config
from fsdptoys.device import GIB, Device, float64_collectives
from fsdptoys.train.distributed import process_group
from scripts.common.machine import machine
from scripts.smoke.report import Report
from scripts.smoke.runs import COMMON, RANK


def check_device(report: Report, device: str) -> None:
    """Versions, memory outside the allocator, expandable segments, and products against float64."""
    for package in ("triton", "numpy", "transformers", "torchao", "hydra-core"):
        spec = importlib.util.find_spec(package.replace("hydra-core", "hydra"))
        report.fact(
            package, importlib.metadata.version(package) if spec else "not installed"
        )
    report.fact(
        "compilers", [name for name in ("cc", "gcc", "nvcc") if shutil.which(name)]
    )
    on = Device(device, 0)
    if device == "cuda":
        report.fact("cuda", torch.version.cuda)
        report.fact("cudnn", torch.backends.cudnn.version())
        report.fact("nccl", ".".join(map(str, torch.cuda.nccl.version())))
        report.fact("capability", torch.cuda.get_device_capability())
        torch.zeros(1, device=device)
        free, total = torch.cuda.mem_get_info()
        report.fact("GiB of the device", total / GIB)
        report.fact(
            "GiB outside the allocator with a context",
            (total - free - torch.cuda.memory_reserved()) / GIB,
        )
    report.fact("machine", machine(device))
    _check_products(report, device)
    if on.is_accelerator:
        _check_memory(report, on)


def _check_products(report: Report, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    # 1e-3 would be TF32.
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        x = a.to(dtype)
        y = b.to(dtype)
        actual = x.to(device) @ y.to(device)
        expected = x.double() @ y.double()
        report.error(
            f"{dtype} product against float64",
            relative_error(actual, expected),
            tolerance,
        )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative error in the Frobenius norm; NaN stays NaN."""
    expected = expected.detach().cpu().double()
    return ((actual.detach().cpu().double() - expected).norm() / expected.norm()).item()


def _check_memory(report: Report, on: Device) -> None:
    """Two units, freed, then three: with expandable segments the allocator grows one segment to
    three units."""
    unit = GIB if on.type == "cuda" else 2**20
    for count in (2, 3):
        values = torch.full(
            (count * unit,), count, dtype=torch.uint8, device=on.torch_device
        )
        extremes = [int(extreme) for extreme in values.aminmax()]
        report.expect(
            extremes == [count, count],
            f"{count} units of memory hold {extremes}, written was {count}",
        )
        del values
    if on.type == "cuda":
        reserved = torch.cuda.memory_reserved() / GIB
        setting = os.environ.get(
            "PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        )
        report.fact("allocator settings", setting)
        report.expect(
            reserved < 3.5,
            f"2 GiB freed, then 3 GiB taken: {reserved:.2f} GiB reserved, expandable below 3.5",
        )


def check_process_group(report: Report, device: str) -> None:
    """Collectives of one rank give back their input; groups beside the first can be made."""
    os.environ.update(RANK)
    config = compose_config([*COMMON, f"launch.device={device}"])
    on = Device(device, 0)
    with process_group(config):
        report.fact("backend", dist.get_backend())
        dtypes = [
            torch.float32,
            torch.bfloat16,
            *([torch.float64] if float64_collectives(device) else []),
        ]
        for dtype in dtypes:
            values = torch.arange(1, 1001, device=on.torch_device).to(dtype)
            reduced = values.clone()
            gathered = torch.empty_like(values)
            scattered = torch.empty_like(values)
            dist.all_reduce(reduced)
            dist.all_gather_into_tensor(gathered, values)
            dist.reduce_scatter_tensor(scattered, values)
            for name, actual in (
                ("all_reduce", reduced),
                ("all_gather", gathered),
                ("reduce_scatter", scattered),
            ):
                report.expect(
                    torch.equal(actual, values),
                    f"{name} of one rank in {dtype} gives its input",
                )
        gloo = dist.new_group([0], backend="gloo")
        count = torch.ones(3)
        dist.all_reduce(count, group=gloo)
        report.expect(
            count.tolist() == [1.0] * 3,
            "a gloo group beside the device's gives its input",
        )
        dist.barrier(group=gloo)
        if on.bound_device is not None and device == "cuda":
            group = dist.split_group(None, [[0]])
            values = torch.ones(3, device=on.torch_device)
            dist.all_reduce(values, group=group)
            report.expect(
                values.tolist() == [1.0] * 3,
                "a split group of one rank gives its input",
            )
