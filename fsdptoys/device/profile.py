"""Hardware profiles: the capabilities of a node's devices, one YAML file of ``configs/hardware``
each, with sources.

A number is written as ``{value: 3.35e+12, source: "NVIDIA H100 SXM data sheet"}``. An efficiency is
the reached share of a peak; without a measurement its source says that it is assumed. ``fsdptoys
plan calibrate`` replaces efficiencies by measured ones. A custom profile is a copy of one of these
files.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

import fsdptoys.configs
from fsdptoys.errors import ConfigError
from fsdptoys.utils.foreign import parse_yaml
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.text import one_line, suggestion

from .kinds import DEVICE_TYPES

PROFILES = Path(fsdptoys.configs.__file__).parent / "hardware"
LARGEST_PROFILE_BYTES = 2**16
BACKENDS = [f"{name}{heads}" for name in ("flash", "cudnn", "efficient") for heads in ("", " 64")]
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

    value: float
    source: str


@dataclass(frozen=True)
class Hardware:
    """One kind of device in its nodes. Rates are bytes or operations per second."""

    name: str
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
    inter_node_bandwidth: Quantity  # A device's share of the node's network, one direction
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
    if not (isinstance(name_or_path, Path) or text.endswith((".yaml", ".yml")) or "/" in text):
        if text not in list_hardware():
            raise ConfigError(
                f"plan.hardware={text} is not a profile; "
                f"{_fix('plan.hardware=', text, list_hardware())}"
            )
        name_or_path = PROFILES / f"{text}.yaml"
    path = Path(name_or_path)
    tree = _read(path)
    where = f"the hardware profile {path}"
    fields = {
        field.name: field.type for field in dataclasses.fields(Hardware) if field.name != "name"
    }
    tree.setdefault("attention_backends", {})
    _check_keys(tree, fields, where)
    values = {**tree, "name": path.stem}
    for key, kind in fields.items():
        value = tree[key]
        if kind is Quantity:
            values[key] = _quantity(value, key, where)
        elif key == "peak_flops":
            if not isinstance(value, dict) or not value:
                raise ConfigError(
                    f"{where} has peak_flops={value}; give a number for each dtype, bfloat16 at "
                    "least"
                )
            values[key] = {
                str(dtype): _quantity(peak, f"peak_flops.{dtype}", where)
                for dtype, peak in value.items()
            }
        elif key == "attention_backends":
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{where} has {key}={value}; give an efficiency for each backend, such as cudnn"
                )
            for backend in value:
                _choice(backend, key, BACKENDS, where)
            values[key] = {
                backend: _quantity(share, f"{key}.{backend}", where)
                for backend, share in value.items()
            }
        elif key == "attention":
            values[key] = AttentionKind(
                _choice(value, key, [choice.value for choice in AttentionKind], where)
            )
        elif key == "device_type":
            values[key] = _choice(value, key, DEVICE_TYPES, where)
        elif key == "matches":
            if not isinstance(value, list) or not all(
                isinstance(words, str) and words.strip() for words in value
            ):
                raise ConfigError(
                    f"{where} has matches={value}; give a list of words, which may be empty: []"
                )
            values[key] = tuple(value)
        elif not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{where} has {key}={value}; give a text")
    hardware = Hardware(**values)
    if hardware.usable_bytes <= 0:
        raise ConfigError(
            f"{where} has outside_allocator_bytes={hardware.outside_allocator_bytes.value:g}, "
            f"which leaves nothing of memory_bytes={hardware.memory_bytes.value:g}; correct one "
            "of them"
        )
    return hardware


def hardware_for(device_name: str, device_type: str) -> str | None:
    """Return the profile that matches a reported device name; None if there is none.

    Slower variants have PCIe, NVL, MIG, Laptop or D in their names, and match only if a profile
    names them. A CPU's name says nothing about its speed: ``cpu`` must be requested.
    """
    matches = []
    for hardware in map(load_hardware, list_hardware()):
        for words in hardware.matches if hardware.device_type == device_type else ():
            rest = re.sub(rf"(?<!\w){re.escape(words)}(?!\w)", "", device_name, flags=re.IGNORECASE)
            if rest != device_name and not re.search(
                r"\b(PCIe|NVL|MIG|Laptop|D)\b", rest, flags=re.IGNORECASE
            ):
                matches.append((len(words), hardware.name))
    return max(matches)[1] if matches else None


def dump_hardware(hardware: Hardware) -> str:
    """Return a profile as YAML for ``load_hardware``."""
    tree = dataclasses.asdict(hardware) | {
        "attention": hardware.attention.value,
        "matches": list(hardware.matches),
    }
    del tree["name"]
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = parse_yaml(read_regular(path, LARGEST_PROFILE_BYTES))
    except OSError as error:
        fix = f"set plan.hardware to one of {', '.join(list_hardware())}, or to a YAML file"
        raise ConfigError(
            f"plan.hardware={path} cannot be read ({error.strerror or error}); {fix}"
        ) from error
    except ValueError as error:
        fix = "start from a copy of a profile"
        raise ConfigError(
            f"plan.hardware={path} cannot be read as YAML ({one_line(error)}); {fix}"
        ) from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"plan.hardware={path} is not a profile; start from a copy of one in configs/hardware"
        )
    return tree


def _check_keys(tree: dict[str, Any], fields: dict[str, Any], where: str) -> None:
    unknown = [key for key in tree if key not in fields]
    missing = [key for key in fields if key not in tree]
    if unknown:
        fix = suggestion(str(unknown[0]), missing or list(fields), "delete it")
        raise ConfigError(f"{where} has an unknown key {unknown[0]}; {fix}")
    if missing:
        raise ConfigError(
            f"{where} lacks {missing[0]}; add it as in the profiles of configs/hardware"
        )


def _quantity(value: object, key: str, where: str) -> Quantity:
    if not isinstance(value, dict) or set(value) != {"value", "source"}:
        raise ConfigError(
            f"{where} has {key}={value}; write {{value: NUMBER, source: WHERE IT IS FROM}}"
        )
    number = value["value"]
    source = value["source"]
    if not isinstance(source, str) or not source.strip():
        raise ConfigError(
            f"{where} has no source for {key}; write the source of its value {number}, or "
            "'assumed: WHY'"
        )
    if isinstance(number, str) and re.fullmatch(r"[\d.]+[eE]\d+", number):
        # YAML 1.1 reads 3.35e12 as text.
        raise ConfigError(
            f"{where} has {key}.value={number}, which YAML reads as text; write {float(number):.6e}"
        )
    if (
        isinstance(number, bool)
        or not isinstance(number, (int, float))
        or not (math.isfinite(number) and number > 0)
    ):
        raise ConfigError(f"{where} has {key}.value={number}; give a finite number above 0")
    if number > 1 and (key.endswith("_efficiency") or key.startswith("attention_backends.")):
        raise ConfigError(f"{where} has {key}.value={number}, an efficiency; give a number up to 1")
    if key == "devices_per_node" and number != int(number):
        raise ConfigError(f"{where} has {key}.value={number}; give a whole number")
    return Quantity(float(number), source)


def _choice(value: object, key: str, choices: Sequence[str], where: str) -> str:
    if value not in choices:
        raise ConfigError(f"{where} has {key}={value}; {_fix(f'{key}: ', str(value), choices)}")
    return str(value)


def _fix(prefix: str, value: str, choices: Sequence[str]) -> str:
    return suggestion(value, choices, f"set {prefix}{' | '.join(choices)}", prefix)
