"""Predictions of a run and their caveats."""

import dataclasses

import pytest

from fsdptoys.config.compose import compose_config
from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.config.schema import Config
from fsdptoys.device.profile import load_hardware
from fsdptoys.plan.estimate.estimate import closed_form
from fsdptoys.plan.predict import disagreement, doubts, estimate_run, hardware_of, world_size_of
from fsdptoys.plan.search.switches import node_ranks_of, validate_switches

BF16 = "parallel.param_dtype=bfloat16"
MOE = "model=qwen3_moe_debug"
LAYOUT = "train.deterministic=layout"
COMPILED = "{rms_norm=compiled, rotary=compiled, swiglu=compiled}"


def composed(*words: str, device_type: str = "cuda", world_size: int = 8) -> Config:
    config = compose_config(["experiment=null", *words])
    config.validate(world_size, device_type)
    return config


@pytest.mark.parametrize(
    "words, predicted",
    [
        (["plan.hardware=cpu"], True),
        (["plan.predict=false"], False),
        # A CPU's name does not determine its speed, and offload on a CPU moves no memory.
        ([], False),
        (["plan.hardware=cpu", "memory.optimizer_offload=true"], False),
    ],
)
def test_run_is_predicted_on_known_devices_only(words: list[str], predicted: bool) -> None:
    """Oracle: the table, and the closed form on that profile."""
    config = composed(*words, device_type="cpu", world_size=2)
    found = estimate_run(config, 2)
    assert (found is not None) == predicted
    if found is not None:
        assert found == (closed_form(config, load_hardware("cpu"), 2), load_hardware("cpu"))


def test_segment_kind_changes_reserved_memory() -> None:
    """Oracle: the closed form for each; a small model fills segments of 20 MiB badly."""
    configs = [composed(f"plan.allocator={kind.value}") for kind in AllocatorKind]
    assert len({closed_form(config, load_hardware("h100"), 8).memory.reserved_bytes for config in configs}) == 2


@pytest.mark.parametrize(
    "words, ranks",
    [
        (["plan.world_size=48"], 48),
        ([], 8),
        (["parallel=single"], 1),
        (["launch.nnodes=3", "launch.rdzv_endpoint=a:1"], 24),
        (["launch.nproc_per_node=4"], 4),
    ],
)
def test_world_size_defaults_to_the_ranks_of_one_node(words: list[str], ranks: int) -> None:
    """Oracle: the table, for machines of eight devices."""
    config = compose_config(["experiment=null", "plan.hardware=h100", *words])
    assert world_size_of(config, hardware_of(config)) == ranks


@pytest.mark.parametrize(
    "words, ranks, expected",
    [
        ((), 1024, "time beyond 128 ranks is not validated"),
        (("plan.memory_gib=500",), 8, "plan.memory_gib=500 is over the 77.61 GiB that h100 leaves the allocator"),
        (("parallel=fsdp1",), 8, "only two steps are traced; reserved memory may grow in a third"),
        (("train.compile=true",), 8, "train.compile=true is predicted as eager"),
        (("train.float8=rowwise", BF16), 8, "train.float8=rowwise is predicted as bfloat16 matmuls"),
        (("kernels.rms_norm=compiled",), 8, f"kernels.{COMPILED} are assumed to touch each tensor once"),
        ((MOE,), 8, "experts are assumed to receive equal numbers of tokens"),
        ((MOE, LAYOUT), 8, f"{LAYOUT} is predicted for experts as the default mode"),
    ],
)
def test_caveats_are_reported_only_where_they_apply(words: tuple[str, ...], ranks: int, expected: str) -> None:
    """Oracle: the expected message is there; without the setting it is not."""
    hardware = load_hardware("h100")
    found = doubts(composed(*words), hardware, ranks)
    plain = doubts(composed(), hardware, 8)
    assert sum(sentence.startswith(expected) for sentence in found) == 1
    assert not any(sentence.startswith(expected) for sentence in plain)


@pytest.mark.parametrize(
    ("name", "band"),
    [
        ("a2", "took 1.05 to 1.18 times as long as predicted for this trainer without offload"),
        ("h100", "published steps of torchtitan took 1.14 and 1.19 times as long as predicted"),
        ("h200", "eight steps of Llama 3 1B and 8B on one device took 0.98 to 1.04 times as long as predicted"),
        ("b200", "no published step was compared with its times"),
    ],
)
def test_caveat_names_the_errors_of_a_profiles_times(name: str, band: str) -> None:
    """Oracle: the tables of benchmarks/plan.md and gpu_planned.md; runs exist for three profiles."""
    (found,) = [sentence for sentence in doubts(composed(), load_hardware(name), 8) if band in sentence]
    assert found.startswith(f"plan.hardware={name} assumes")


def test_shard_groups_across_nodes_have_a_caveat() -> None:
    """Oracle: the expected message, for nodes of eight; its costs start every group at a node."""
    config = composed("plan.hardware=h100", "mesh.fsdp_size=12", world_size=24)
    (found,) = [sentence for sentence in doubts(config, load_hardware("h100"), 24) if "across two" in sentence]
    assert found.startswith("mesh.fsdp_size=12 on nodes of 8 ranks") and found.endswith("at a node's first rank")


@pytest.mark.parametrize(
    "words, world_size, size",
    [([], 16, 8), ([], 12, 6), ([], 4, 4), (["launch.nproc_per_node=4"], 16, 4), (["launch.nproc_per_node=4"], 2, 2)],
)
def test_node_fsdp_size_uses_the_devices_of_the_hardware_profile(words: list[str], world_size: int, size: int) -> None:
    """Oracle: the table, for machines of up to eight."""
    config = compose_config(["experiment=null", "plan.hardware=h100", "mesh.fsdp_size=node", *words])
    validate_switches(config, world_size, "cuda", node_ranks_of(config, load_hardware("h100"), world_size))
    assert config.mesh.fsdp_size == size


@pytest.mark.parametrize(
    ("hardware", "words", "expected"),
    [
        ("a2", (), False),
        ("a2", ("kernels.grouped_matmul=torch",), True),
        ("h100", (BF16,), False),
        ("h100", ("parallel.param_dtype=float32",), True),
    ],
)
def test_device_without_grouped_matmul_has_a_caveat(hardware: str, words: tuple[str, ...], expected: bool) -> None:
    """Oracle: the expected message; NPUs use torch_npu's grouped matmul by default, CUDA has a kernel for bfloat16."""
    profile = load_hardware(hardware)
    config = composed(MOE, *words, device_type=profile.device_type)
    assert any("multiplied one by one" in sentence for sentence in doubts(config, profile, 8)) is expected


def test_predictions_that_differ_by_over_10_percent_are_reported() -> None:
    """Oracle: changes by hand: 9% is silent, 11% is one sentence."""
    prediction = closed_form(composed(), load_hardware("h100"), 8)
    for factor, count in ((1.09, 0), (1.11, 1), (0.89, 1)):
        peak = round(prediction.memory.peak_bytes * factor)
        other = dataclasses.replace(prediction, memory=dataclasses.replace(prediction.memory, peak_bytes=peak))
        assert len(disagreement(prediction, other)) == count
