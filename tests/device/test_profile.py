"""Hardware profiles: those of the repository are complete with sources; mistakes are reported in
one sentence."""

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
    fields = {
        field.name: getattr(hardware, field.name)
        for field in dataclasses.fields(hardware)
    }
    fields |= {
        f"peak_flops.{dtype}": peak for dtype, peak in hardware.peak_flops.items()
    }
    fields |= {
        f"{backend}_efficiency": share
        for backend, share in hardware.attention_backends.items()
    }
    return {
        name: value for name, value in fields.items() if isinstance(value, Quantity)
    }


def test_list_of_profiles_is_as_documented() -> None:
    """Oracle: the list that the documentation promises."""
    assert list_hardware() == [
        "4090",
        "a100",
        "a2",
        "b200",
        "cpu",
        "h100",
        "h200",
        "l40s",
    ]


@pytest.mark.parametrize("name", list_hardware())
def test_every_number_has_a_source(name: str) -> None:
    """Oracle: a source is a measurement, a derivation, an assumption that calls itself one, or
    names a document."""
    hardware = load_hardware(name)
    assert hardware.name == name and "bfloat16" in hardware.peak_flops
    for key, quantity in quantities(hardware).items():
        assert len(quantity.source) > 8, key
        if key.endswith("_efficiency"):
            assert re.search(
                r"assumed|measured|github|arXiv|reached", quantity.source
            ), key


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
        ("NVIDIA H200 NVL", "cuda", None),
        ("NVIDIA A100-SXM4-80GB", "cuda", "a100"),
        ("NVIDIA GeForce RTX 4090 D", "cuda", None),
        ("NVIDIA L40", "cuda", None),
        ("Ascend910B3", "npu", "a2"),
        ("Ascend910B3", "cuda", None),
        ("AMD EPYC 9654 96-Core Processor", "cpu", None),
    ],
)
def test_profile_is_found_by_device_name(
    device_name: str, device_type: str, profile: str | None
) -> None:
    """Oracle: names as the drivers give them; forms that differ in speed or memory have no
    profile."""
    assert hardware_for(device_name, device_type) == profile


MISTAKES = yaml.safe_load(
    Path(__file__).with_name("profile_mistakes.yaml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize(
    "mistake", MISTAKES, ids=[mistake["says"] for mistake in MISTAKES]
)
def test_mistakes_in_a_profile_are_reported_in_one_sentence(
    tmp_path: Path, mistake: dict[str, Any]
) -> None:
    """Oracle: the reason by hand, which names key and value."""
    tree = (
        yaml.safe_load((PROFILES / "h100.yaml").read_text(encoding="utf-8"))
        | mistake["changes"]
    )
    path = tmp_path / "mine.yaml"
    path.write_text(
        yaml.safe_dump({key: value for key, value in tree.items() if value is not None})
    )
    with pytest.raises(ConfigError) as caught:
        load_hardware(str(path))
    assert str(caught.value).startswith(
        f"plan.hardware={path} cannot be used ({mistake['says']}); correct it by the profiles of"
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("h1000", "is not a profile; did you mean plan.hardware=h100?"),
        ("xyz", "is not a profile; set plan.hardware=4090 | a100 | "),
        ("missing.yaml", "cannot be used (No such file or directory); correct it "),
        ("list.yaml", "cannot be used (it is [1], not a mapping); "),
        ("long.yaml", "cannot be used (it is longer than 65536 bytes); "),
    ],
)
def test_unknown_and_unreadable_profiles_are_refused(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the message by hand."""
    monkeypatch.chdir(tmp_path)
    Path("list.yaml").write_text("- 1")
    Path("long.yaml").write_text("# " + "x" * 2**16)
    with pytest.raises(ConfigError) as caught:
        load_hardware(name)
    assert str(caught.value).startswith(f"plan.hardware={name} {sentence}")
