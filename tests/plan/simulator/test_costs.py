"""Costs against the formulas they claim and against bus bandwidths worked out by hand."""

import dataclasses

import pytest

from fsdptoys.device.profile import Hardware, Quantity, load_hardware
from fsdptoys.plan.simulator.costs import (
    collective_seconds,
    host_work_seconds,
    kernel_seconds,
    sent_bytes,
    spread,
    transfer_seconds,
)
from fsdptoys.plan.simulator.events import KernelKind
from tests.harness.traced_runs import imagined_hardware

MIB = 2**20


def h100(**changes: float) -> Hardware:
    """Peaks and links of an H100 without latencies and with links that reach all they have."""
    exact = {
        name: 1.0
        for name in (
            "matmul_efficiency",
            "intra_node_efficiency",
            "inter_node_efficiency",
        )
    }
    exact |= {
        "intra_node_latency_seconds": 0.0,
        "inter_node_latency_seconds": 0.0,
    } | changes
    return dataclasses.replace(
        load_hardware("h100"),
        **{name: Quantity(value, "test") for name, value in exact.items()},
    )


@pytest.mark.parametrize(
    ("kind", "flops", "bytes", "dtype", "seconds"),
    [
        (KernelKind.matmul, 60.0, 10, "bfloat16", 120.0),  # half of one FLOP/s
        (KernelKind.matmul, 60.0, 10, "float32", 240.0),
        (
            KernelKind.matmul,
            60.0,
            10,
            "float8_e4m3fn",
            240.0,
        ),  # the slowest dtype that has a peak
        (KernelKind.attention, 60.0, 10, "bfloat16", 240.0),  # a quarter
        (
            KernelKind.matmul,
            1.0,
            10,
            "bfloat16",
            12.5,
        ),  # memory-bound: 0.8 bytes a second
        (KernelKind.memory, 60.0, 10, "bfloat16", 12.5),  # independent of its FLOPs
        (KernelKind.memory, 0.0, 1, "bfloat16", 3.0),  # no kernel is shorter
    ],
)
def test_kernel_time_follows_the_roofline(
    kind: KernelKind, flops: float, bytes: int, dtype: str, seconds: float
) -> None:
    """Oracle: the roofline, by hand."""
    hardware = imagined_hardware(
        matmul_efficiency=0.5,
        attention_efficiency=0.25,
        memory_efficiency=0.8,
        kernel_seconds=3.0,
    )
    assert kernel_seconds(hardware, kind, flops, bytes, dtype) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("backend", "seconds"),
    [
        ("flash", 400.0), ("flash 64", 800.0), ("cudnn", 200.0), ("cudnn 128", 200.0),
        ("cudnn 64", 1000.0), ("efficient", 400.0), ("efficient 64", 800.0), ("", 400.0),
    ],
)  # fmt: skip
def test_attention_runs_at_the_efficiency_of_its_backend(
    backend: str, seconds: float
) -> None:
    """Oracle: 100 FLOPs at 0.25 of one FLOP/s, or at the share of the backend for that head
    width."""
    listed = {
        "cudnn": Quantity(0.5, "test"),
        "cudnn 64": Quantity(0.1, "test"),
        "flash 64": Quantity(0.125, "test"),
    }
    hardware = dataclasses.replace(
        imagined_hardware(attention_efficiency=0.25), attention_backends=listed
    )
    assert kernel_seconds(
        hardware, KernelKind.attention, 100.0, 1, "bfloat16", backend
    ) == pytest.approx(seconds)


def test_host_and_transfer_times_follow_their_definitions() -> None:
    """Oracle: the definitions."""
    hardware = imagined_hardware(
        transfer_latency_seconds=5.0,
        transfer_bandwidth=2.0,
        cpu_bandwidth=4.0,
        cpu_adam_parameters_per_second=10.0,
    )
    assert transfer_seconds(hardware, 100) == 55.0
    assert host_work_seconds(hardware, 10_000, elements=100) == 10.0
    assert host_work_seconds(hardware, 100) == 25.0


@pytest.mark.parametrize(
    ("name", "size", "sent"),
    [
        ("all_gather", 8, 7 / 8),
        ("reduce_scatter", 8, 7 / 8),
        ("all_to_all", 4, 3 / 4),
        ("all_reduce", 8, 2 * 7 / 8),
        ("broadcast", 8, 1.0),
        ("reduce", 8, 1.0),
        ("all_reduce", 1, 0.0),
    ],
)
def test_sent_bytes_follow_the_factors_of_nccl_tests(
    name: str, size: int, sent: float
) -> None:
    """Oracle: the correction factors in doc/PERFORMANCE.md of nccl-tests."""
    assert sent_bytes(name, 1000, size) == pytest.approx(1000 * sent)


@pytest.mark.parametrize(
    ("size", "stride"),
    [(4, 1), (8, 1), (16, 1), (12, 1), (1024, 1), (16, 8), (4, 4), (2, 64)],
)
def test_spread_counts_nodes_and_members_per_node(size: int, stride: int) -> None:
    """Oracle: counting ranks 0, stride, 2 stride, … in machines of eight."""
    nodes = [index * stride // 8 for index in range(size)]
    assert spread(load_hardware("h100"), size, stride) == (
        len(set(nodes)),
        max(map(nodes.count, nodes)),
    )


@pytest.mark.parametrize(
    ("name", "size", "stride", "bus_bandwidth"),
    [
        ("all_gather", 8, 1, 450e9),  # NVLink alone
        ("all_reduce", 8, 1, 450e9),
        ("reduce_scatter", 16, 1, 400e9),  # 8 cards of 50 GB/s are less than NVLink
        ("all_gather", 1024, 1, 400e9),
        ("all_reduce", 16, 8, 50e9),  # replicas: one card each
        ("all_gather", 8, 4, 100e9),  # two members in a machine, two cards
    ],
)
def test_bus_bandwidth_is_that_of_the_slowest_link(
    name: str, size: int, stride: int, bus_bandwidth: float
) -> None:
    """Oracle: bus bandwidths as nccl-tests reports them, computed from the links by hand."""
    bytes = 1024 * MIB
    seconds = collective_seconds(h100(), name, bytes, size, stride)
    assert sent_bytes(name, bytes, size) / seconds == pytest.approx(bus_bandwidth)


@pytest.mark.parametrize(
    ("name", "size", "stride", "latency"),
    [
        ("all_gather", 8, 1, 7 * 3),
        ("all_gather", 16, 1, 1 * 10 + 14 * 3),
        ("reduce_scatter", 4, 8, 3 * 10),
        ("all_reduce", 8, 1, 2 * 7 * 3),
        ("all_reduce", 64, 1, 2 * (3 * 10 + 7 * 3)),
        ("all_reduce", 16, 8, 2 * 4 * 10),
        ("all_to_all", 16, 1, 10 + 3),
    ],
)
def test_latency_follows_the_steps_of_ring_and_tree(
    name: str, size: int, stride: int, latency: float
) -> None:
    """Oracle: NCCL's cost model: steps of a ring between and within machines, depth of a tree of
    machines."""
    hardware = h100(intra_node_latency_seconds=3e-6, inter_node_latency_seconds=10e-6)
    assert collective_seconds(hardware, name, 0, size, stride) == pytest.approx(
        latency * 1e-6
    )


def test_all_to_all_leaves_the_node_over_the_ranks_own_nic() -> None:
    """Oracle: computed by hand: of 16 ranks' shares, 8 leave by 50 GB/s while 7 stay at 450."""
    assert collective_seconds(
        h100(), "all_to_all", 16_000_000_000, 16, 1
    ) == pytest.approx(8 / 50)


def test_collective_of_one_rank_is_a_copy() -> None:
    """Oracle: one kernel that reads and writes."""
    hardware = imagined_hardware(memory_bandwidth=10.0)
    assert collective_seconds(hardware, "all_gather", 50, 1, 1) == 10.0
