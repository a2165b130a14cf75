"""Seconds of an operator, copy or collective on a hardware profile.

A kernel follows a roofline (https://doi.org/10.1145/1498765.1498785). A collective is a ring, as in
NCCL and HCCL for large buffers, counted as nccl-tests counts bus bandwidth
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md); between nodes there is one
ring for each of the group's ranks in a node, each over its own network card. Latency grows with the
steps of the ring, for an all-reduce with the depth of a tree of nodes, as in NCCL's cost model
(``src/graph/tuning.cc`` of https://github.com/NVIDIA/nccl).
"""

import math

from fsdptoys.device.profile import Hardware

from .events import KernelKind, Message, Messages


def spread(hardware: Hardware, group_size: int, group_stride: int) -> tuple[int, int]:
    """Nodes of a group, and its ranks in one node; ranks are numbered node by node.

    ``group_stride`` is the distance between neighbors in the global rank order.
    """
    devices = int(hardware.devices_per_node.value)
    local = min(group_size, max(1, devices // group_stride))
    return -(-group_size // local), local


def bandwidths(hardware: Hardware) -> tuple[float, float]:
    """Reached bandwidths of a device within a node and of a network card, in bytes per second."""
    return (
        hardware.intra_node_bandwidth.value * hardware.intra_node_efficiency.value,
        hardware.inter_node_bandwidth.value * hardware.inter_node_efficiency.value,
    )


def kernel_seconds(
    hardware: Hardware,
    kind: KernelKind,
    flops: float,
    bytes: int,
    dtype: str,
    attention: str = "",
) -> float:
    """Time of an operator on the device; a dtype without a peak of its own counts with the slowest
    listed peak.

    ``attention`` names a backend; one that the profile does not list runs as fast as FlashAttention
    at its width.
    """
    seconds = bytes / (
        hardware.memory_bandwidth.value * hardware.memory_efficiency.value
    )
    if kind is not KernelKind.memory:
        peaks = hardware.peak_flops
        peak = (
            peaks[dtype].value
            if dtype in peaks
            else min(quantity.value for quantity in peaks.values())
        )
        efficiency = hardware.matmul_efficiency
        if kind is KernelKind.attention:
            name, _, heads = attention.partition(" ")
            listed = (
                hardware.attention_backends.get(key)
                for key in (attention, name, f"flash {heads}".rstrip())
            )
            efficiency = next(filter(None, listed), hardware.attention_efficiency)
        seconds = max(seconds, flops / (peak * efficiency.value))
    return max(seconds, hardware.kernel_seconds.value)


def transfer_seconds(hardware: Hardware, bytes: int) -> float:
    """Time of a copy between host and device in one direction."""
    return (
        hardware.transfer_latency_seconds.value
        + bytes / hardware.transfer_bandwidth.value
    )


def host_work_seconds(hardware: Hardware, bytes: int, elements: int = 0) -> float:
    """Time of an operator on host memory, on one device's share of the cores: AdamW over
    ``elements`` float32 parameters, or else ``bytes`` of traffic."""
    if elements:
        return elements / hardware.cpu_adam_parameters_per_second.value
    return bytes / hardware.cpu_bandwidth.value


def sent_bytes(name: str, bytes: int, group_size: int) -> float:
    """Bytes that one rank sends in a collective, counted as nccl-tests does for its bus bandwidth.

    ``bytes`` is the full buffer to gather, scatter or reduce; for an all-to-all, one rank's input.
    """
    if group_size == 1:
        return 0.0
    if name in ("broadcast", "reduce", "send", "recv"):
        return float(bytes)
    return bytes * (group_size - 1) / group_size * (2 if name == "all_reduce" else 1)


def collective_seconds(
    hardware: Hardware, name: str, bytes: int, group_size: int, group_stride: int
) -> float:
    """Time of a collective alone on its links, once all ranks have arrived.

    ``sent_bytes / min(intra, local · inter) + latency``, with ``intra`` and ``inter`` the reached
    bandwidths of a device and ``local`` the ranks in a node. The latency of a ring is ``(nodes − 1)
    · inter + (ranks − nodes) · intra``; of an all-reduce ``2 · (log2(nodes) · inter + (local − 1) ·
    intra)``. An all-to-all sends the bytes that leave the node through the rank's own card, all at
    once. Ranks that send to the next one wait for the slowest link of their circle. A single rank
    copies.
    """
    if group_size == 1:
        return kernel_seconds(hardware, KernelKind.memory, 0.0, 2 * bytes, "")
    nodes, local = spread(hardware, group_size, group_stride)
    intra, inter = bandwidths(hardware)
    intra_latency = hardware.intra_node_latency_seconds.value if local > 1 else 0.0
    inter_latency = hardware.inter_node_latency_seconds.value if nodes > 1 else 0.0
    sent = sent_bytes(name, bytes, group_size)
    if name == "all_to_all":
        leaving = bytes * (group_size - local) / group_size
        return (
            max((sent - leaving) / intra, leaving / inter)
            + intra_latency
            + inter_latency
        )
    if name == "send":
        if nodes > 1:
            return sent / inter + inter_latency
        return sent / intra + intra_latency
    links = []
    if local > 1:
        links.append(intra)
    if nodes > 1:
        links.append(local * inter)
    if name == "all_reduce":
        latency = 2 * (math.log2(nodes) * inter_latency + (local - 1) * intra_latency)
    else:
        latency = (nodes - 1) * inter_latency + (group_size - nodes) * intra_latency
    return sent / min(links) + latency


def messages_seconds(hardware: Hardware, event: Messages) -> float:
    """Time of messages that are issued together, once all their ranks have arrived.

    Links have two directions. Messages of one direction pass the link within the node, or the card,
    one after another.
    """
    intra, inter = bandwidths(hardware)
    seconds = []
    for sends in (True, False):
        messages = [message for message in event.messages if message.sends is sends]
        between = sum(
            message.bytes
            for message in messages
            if leaves_node(hardware, event, message)
        )
        within = sum(message.bytes for message in messages) - between
        if within:
            latency = hardware.intra_node_latency_seconds.value
            seconds.append(within / intra + latency)
        if between:
            latency = hardware.inter_node_latency_seconds.value
            seconds.append(between / inter + latency)
    return max(seconds, default=0.0)


def leaves_node(hardware: Hardware, event: Messages, message: Message) -> bool:
    """Whether a message goes between nodes, for any of the ranks that send at the same time as the
    traced one.

    These are the ``group_stride`` ranks from the traced one on, each to the same rank of its own
    group.
    """
    devices = int(hardware.devices_per_node.value)
    stride = event.group_stride
    first = event.rank * stride
    second = message.peer * stride
    return any(
        (first + offset) // devices != (second + offset) // devices
        for offset in range(stride)
    )
