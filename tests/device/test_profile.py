"""Hardware profiles: those of the repository are complete with sources; mistakes are reported in one sentence."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdptoys.device.profile import (
    PROFILES,
    Hardware,
    Quantity,
    dump_hardware,
    hardware_for,
    list_hardware,
    load_hardware,
)
from fsdptoys.errors import ConfigError


def quantities(hardware: Hardware) -> dict[str, Quantity]:
    found = {field.name: getattr(hardware, field.name) for field in dataclasses.fields(hardware)}
    found |= {f"peak_flops.{dtype}": peak for dtype, peak in hardware.peak_flops.items()}
    found |= {f"{backend}_efficiency": share for backend, share in hardware.attention_backends.items()}
    return {name: value for name, value in found.items() if isinstance(value, Quantity)}


def test_list_of_profiles_is_as_documented() -> None:
    """Oracle: the list that the documentation promises."""
    assert list_hardware() == ["4090", "a100", "a2", "b200", "cpu", "h100", "h200", "l40s"]


@pytest.mark.parametrize("name", list_hardware())
def test_every_number_has_a_source(name: str) -> None:
    """Oracle: a source is a measurement, a derivation, an assumption that calls itself one, or names a document."""
    hardware = load_hardware(name)
    assert hardware.name == name and "bfloat16" in hardware.peak_flops
    for key, quantity in quantities(hardware).items():
        assert len(quantity.source) > 8, key
        if key.endswith("_efficiency"):
            assert re.search(r"assumed|measured|github|arXiv|reached", quantity.source), key


@pytest.mark.parametrize("name", list_hardware())
def test_profiles_round_trip(name: str, tmp_path: Path) -> None:
    """Oracle: the profile itself."""
    hardware = load_hardware(name)
    path = tmp_path / f"{name}.yaml"
    path.write_text(dump_hardware(hardware), encoding="utf-8")
    assert load_hardware(str(path)) == load_hardware(path) == hardware


@pytest.mark.parametrize(
    ("device_name", "device_type", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", "cuda", "h100"),
        ("NVIDIA H100 PCIe", "cuda", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "cuda", None),
        ("NVIDIA H200", "cuda", "h200"),
        ("NVIDIA H200 NVL", "cuda", None),
        ("NVIDIA GH200 480GB", "cuda", None),
        ("NVIDIA A100-SXM4-80GB", "cuda", "a100"),
        ("NVIDIA A100-SXM4-40GB", "cuda", None),
        ("NVIDIA B200", "cuda", "b200"),
        ("NVIDIA GeForce RTX 4090", "cuda", "4090"),
        ("NVIDIA GeForce RTX 4090 D", "cuda", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "cuda", None),
        ("NVIDIA L40S", "cuda", "l40s"),
        ("NVIDIA L40", "cuda", None),
        ("Ascend910B3", "npu", "a2"),
        ("Ascend910B4", "npu", None),
        ("Ascend910B3", "cuda", None),
        ("AMD EPYC 9654 96-Core Processor", "cpu", None),
    ],
)
def test_profile_is_found_by_device_name(device_name: str, device_type: str, profile: str | None) -> None:
    """Oracle: names as the drivers give them; forms that differ in speed or memory have no profile."""
    assert hardware_for(device_name, device_type) == profile


def broken(tmp_path: Path, changes: dict[str, Any]) -> str:
    """A copy of a profile with some keys changed, or deleted where the change is None."""
    tree = yaml.safe_load((PROFILES / "h100.yaml").read_text(encoding="utf-8")) | changes
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in tree.items() if value is not None}))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kernel_seconds": None}, "lacks kernel_seconds; add it as in the profiles of configs/hardware"),
        (
            {"kernel_seconds": None, "kernel_second": {"value": 1, "source": "me"}},
            "has an unknown key kernel_second; did you mean kernel_seconds?",
        ),
        ({"zzz": 1}, "has an unknown key zzz; delete it"),
        ({"kernel_seconds": 2e-6}, "has kernel_seconds=2e-06; write {value: NUMBER, source: WHERE IT IS FROM}"),
        (
            {"kernel_seconds": {"value": 2e-6}},
            "has kernel_seconds={'value': 2e-06}; write {value: NUMBER, source: WHERE IT IS FROM}",
        ),
        (
            {"kernel_seconds": {"value": 2e-6, "source": " "}},
            "has no source for kernel_seconds; write the source of its value 2e-06, or 'assumed: WHY'",
        ),
        (
            {"memory_bandwidth": {"value": "3.35e12", "source": "me"}},
            "has memory_bandwidth.value=3.35e12, which YAML reads as text; write 3.350000e+12",
        ),
        (
            {"memory_bandwidth": {"value": -1, "source": "me"}},
            "has memory_bandwidth.value=-1; give a finite number above 0",
        ),
        (
            {"memory_bandwidth": {"value": float("inf"), "source": "me"}},
            "has memory_bandwidth.value=inf; give a finite number above 0",
        ),
        (
            {"memory_efficiency": {"value": 85, "source": "me"}},
            "has memory_efficiency.value=85, an efficiency; give a number up to 1",
        ),
        ({"devices_per_node": {"value": 7.5, "source": "me"}}, "has devices_per_node.value=7.5; give a whole number"),
        ({"attention": "flesh"}, "has attention=flesh; did you mean attention: flash?"),
        ({"device_type": "tpu"}, "has device_type=tpu; did you mean device_type: npu?"),
        ({"device_type": "xyz"}, "has device_type=xyz; set device_type: cuda | npu | cpu"),
        ({"matches": "H100"}, "has matches=H100; give a list of words, which may be empty: []"),
        ({"title": 5}, "has title=5; give a text"),
        (
            {"outside_allocator_bytes": {"value": 9e10, "source": "me"}},
            "has outside_allocator_bytes=9e+10, which leaves nothing of memory_bytes=8.49437e+10; correct one of them",
        ),
        (
            {"attention_backends": {"cudn": {"value": 0.5, "source": "me"}}},
            "has attention_backends=cudn; did you mean attention_backends: cudnn?",
        ),
        (
            {"attention_backends": {"cudnn": {"value": 54, "source": "me"}}},
            "has attention_backends.cudnn.value=54, an efficiency; give a number up to 1",
        ),
        (
            {"attention_backends": 0.5},
            "has attention_backends=0.5; give an efficiency for each backend, such as cudnn",
        ),
        ({"peak_flops": {}}, "has peak_flops={}; give a number for each dtype, bfloat16 at least"),
        (
            {"peak_flops": {"bfloat16": {"value": 0, "source": "me"}}},
            "has peak_flops.bfloat16.value=0; give a finite number above 0",
        ),
    ],
)
def test_mistakes_in_a_profile_are_reported_in_one_sentence(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    """Oracle: the exact message: it names file, key, value and fix."""
    path = broken(tmp_path, changes)
    beginning = f"the hardware profile {path} "
    with pytest.raises(ConfigError, match=f"^{re.escape(beginning + sentence)}$"):
        load_hardware(path)


def test_unknown_and_unreadable_profiles_are_refused(tmp_path: Path) -> None:
    """Oracle: the exact messages."""
    with pytest.raises(ConfigError, match=r"^plan.hardware=h1000 is not a profile; did you mean plan.hardware=h100\?$"):
        load_hardware("h1000")
    with pytest.raises(ConfigError, match=r"^plan.hardware=xyz is not a profile; set plan.hardware=4090 \| a100 \| "):
        load_hardware("xyz")
    path = tmp_path / "mine.yaml"
    with pytest.raises(
        ConfigError, match=r"mine.yaml cannot be read \(No such file or directory\); set plan.hardware to"
    ):
        load_hardware(str(path))
    for text, reason in [
        ("a: [", "cannot be read as YAML"),
        ("- 1", "is not a profile; start from a copy"),
        ("[" * 5000, "cannot be read as YAML"),
        ("# " + "x" * 2**16, r"cannot be read as YAML \(it is longer than 65536 bytes\)"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=reason):
            load_hardware(path)
