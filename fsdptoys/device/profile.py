"""Hardware profiles: the capabilities of a node's devices, one YAML file of ``configs/hardware``
each, with sources.

A number is written as ``{value: 3.35e+12, source: "NVIDIA H100 SXM data sheet"}``. An efficiency is
the reached share of a peak; without a measurement its source says that it is assumed. ``fsdptoys
plan calibrate`` replaces efficiencies by measured ones. A custom profile is a copy of one of these
files.
"""

import dataclasses
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import yaml

import fsdptoys.configs
from fsdptoys.errors import ConfigError
from fsdptoys.utils.bounds import above
from fsdptoys.utils.foreign import ForeignError, parse_yaml
from fsdptoys.utils.from_tree import build
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.text import one_line, suggestion

from .kinds import DEVICE_TYPES

PROFILES = Path(fsdptoys.configs.__file__).parent / "hardware"
LARGEST_PROFILE_BYTES = 2**16
BACKENDS = [
    f"{name}{heads}"
    for name in ("flash", "cudnn", "efficient")
    for heads in ("", " 64")
]
"""Names of PyTorch's attention kernels, for heads of any width or of up to 64."""


class AttentionKind(Enum):
    """Fused attention of the device; decides the tensors kept for the backward and the scratch
    memory."""

    flash = "flash"  # FlashAttention 2 (arXiv:2307.08691) as PyTorch calls it on CUDA
    cudnn = "cudnn"  # cuDNN's, which PyTorch prefers on Hopper and Blackwell; else as ``flash``
    npu = "npu"  # torch_npu's npu_fusion_attention
    cpu = "cpu"

    @property
    def on_cuda(self) -> bool:
        """Whether it is a CUDA device's."""
        return self in (AttentionKind.flash, AttentionKind.cudnn)


@dataclass(frozen=True)
class Quantity:
    """A number and its source."""

    value: float = field(metadata=above(0))
    source: str


@dataclass(frozen=True)
class Hardware:
    """One kind of device in its nodes. Rates are bytes or operations per second."""

    title: str  # Display name
    device_type: str  # ``cuda``, ``npu`` or ``cpu``
    attention: AttentionKind
    matches: tuple[str, ...]  # Parts of the names that such devices report
    peak_flops: dict[str, Quantity]  # dtype → dense FLOP/s
    memory_bytes: Quantity  # As reported by the device
    outside_allocator_bytes: Quantity
    """Device memory of driver, kernels and communication, outside PyTorch's allocator."""
    memory_bandwidth: Quantity
    matmul_efficiency: Quantity
    attention_efficiency: Quantity
    memory_efficiency: Quantity
    kernel_seconds: Quantity  # Minimum time of a kernel
    host_operator_seconds: Quantity  # Host time to issue an operator
    host_collective_seconds: Quantity
    devices_per_node: Quantity
    intra_node_bandwidth: Quantity  # Per device, one direction, within a node
    intra_node_efficiency: Quantity
    intra_node_latency_seconds: Quantity
    # A device's share of the node's network, one direction
    inter_node_bandwidth: Quantity
    inter_node_efficiency: Quantity
    inter_node_latency_seconds: Quantity
    transfer_bandwidth: Quantity
    """Pinned host memory ↔ device, one direction, with all devices of the node at once."""
    transfer_latency_seconds: Quantity
    cpu_adam_parameters_per_second: Quantity
    """Float32 parameters that AdamW updates on one device's share of the cores."""
    cpu_bandwidth: Quantity  # Host memory bandwidth, one device's share
    host_memory_bytes: Quantity  # One device's share
    attention_backends: dict[str, Quantity] = field(default_factory=dict)
    """Backend (``cudnn``, ``flash 64`` for heads of up to 64) → efficiency other than
    ``attention_efficiency``."""
    name: str = ""  # That of the file

    @property
    def usable_bytes(self) -> float:
        """Memory available to the allocator."""
        return self.memory_bytes.value - self.outside_allocator_bytes.value


def list_hardware() -> list[str]:
    """Return the names of the profiles of ``configs/hardware``."""
    return sorted(path.stem for path in PROFILES.glob("*.yaml"))


def load_hardware(name_or_path: str | Path) -> Hardware:
    """Read a profile, a name of ``list_hardware()`` or a YAML file; a ConfigError names an invalid
    key."""
    text = str(name_or_path)
    path = Path(name_or_path)
    if not (
        isinstance(name_or_path, Path)
        or text.endswith((".yaml", ".yml"))
        or "/" in text
    ):
        names = list_hardware()
        if text not in names:
            fix = suggestion(
                text, names, f"set plan.hardware={' | '.join(names)}", "plan.hardware="
            )
            raise ConfigError(f"plan.hardware={text} is not a profile; {fix}")
        path = PROFILES / f"{text}.yaml"
    try:
        hardware = build(
            Hardware, parse_yaml(read_regular(path, LARGEST_PROFILE_BYTES))
        )
        _check(hardware)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"plan.hardware={path} cannot be used ({one_line(reason)}); correct it by the profiles "
            "of configs/hardware, which write a large number as 3.35e+12, or set plan.hardware to "
            f"one of {', '.join(list_hardware())}"
        ) from error
    return dataclasses.replace(hardware, name=path.stem)


def hardware_for(device_name: str, device_type: str) -> str | None:
    """Return the profile that matches a reported device name; None if there is none.

    Slower variants have PCIe, NVL, MIG, Laptop or D in their names, and match only if a profile
    names them. A CPU's name says nothing about its speed: ``cpu`` must be requested.
    """
    matches = []
    for hardware in map(load_hardware, list_hardware()):
        for part in hardware.matches if hardware.device_type == device_type else ():
            rest = re.sub(
                rf"(?<!\w){re.escape(part)}(?!\w)",
                "",
                device_name,
                flags=re.IGNORECASE,
            )
            if rest != device_name and not re.search(
                r"\b(PCIe|NVL|MIG|Laptop|D)\b", rest, flags=re.IGNORECASE
            ):
                matches.append((len(part), hardware.name))
    return max(matches)[1] if matches else None


def dump_hardware(hardware: Hardware) -> str:
    """Return a profile as YAML for ``load_hardware``."""
    tree = dataclasses.asdict(hardware) | {
        "attention": hardware.attention.value,
        "matches": list(hardware.matches),
    }
    del tree["name"]
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)


def _check(hardware: Hardware) -> None:
    """Check what the types do not say; a ForeignError otherwise."""
    if hardware.device_type not in DEVICE_TYPES:
        raise ForeignError(
            f"device_type is {hardware.device_type}, not {' | '.join(DEVICE_TYPES)}"
        )
    shares = {
        key: value
        for key, value in vars(hardware).items()
        if key.endswith("_efficiency")
    }
    for backend, share in hardware.attention_backends.items():
        if backend not in BACKENDS:
            raise ForeignError(
                f"attention_backends has {backend}, not {' | '.join(BACKENDS)}"
            )
        shares[f"attention_backends.{backend}"] = share
    for key, share in shares.items():
        if share.value > 1:
            raise ForeignError(
                f"{key}.value is {share.value:g}, not an efficiency up to 1"
            )
    if hardware.devices_per_node.value % 1:
        raise ForeignError(
            f"devices_per_node.value is {hardware.devices_per_node.value:g}, not a whole number"
        )
    if not hardware.peak_flops:
        raise ForeignError("peak_flops is {}, not a number for each dtype")
    if hardware.usable_bytes <= 0:
        raise ForeignError(
            f"outside_allocator_bytes.value is {hardware.outside_allocator_bytes.value:g}, which "
            f"leaves nothing of memory_bytes.value={hardware.memory_bytes.value:g}"
        )
