"""Predictions of a run and their caveats, traced depths and the line through them."""

from dataclasses import dataclass, field

import pytest
import torch

from fsdptoys.config.compose import compose_config
from fsdptoys.config.plan_config import AllocatorKind
from fsdptoys.config.schema import Config
from fsdptoys.device.profile import load_hardware
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.plan.predict import (
    caveats,
    estimate_run,
    hardware_of,
    predict,
    world_size_of,
)
from fsdptoys.plan.search.switches import node_ranks_of, validate_switches
from fsdptoys.plan.trace.extrapolate_layers import depths_of, extrapolate

BF16 = "parallel.param_dtype=bfloat16"
MOE = "model=qwen3_moe_debug"
LAYOUT = "train.deterministic=layout"
COMPILED = "{rms_norm=compiled, rotary=compiled, swiglu=compiled}"


def composed(*overrides: str, device_type: str = "cuda", world_size: int = 8) -> Config:
    config = compose_config(["experiment=null", *overrides])
    config.validate(world_size, device_type)
    return config


@pytest.mark.parametrize(
    "overrides, predicted",
    [
        (["plan.hardware=cpu"], True),
        (["plan.predict=false"], False),
        # A CPU's name does not determine its speed, and offload on a CPU moves no memory.
        ([], False),
        (["plan.hardware=cpu", "memory.optimizer_offload=true"], False),
    ],
)
def test_run_is_predicted_on_known_devices_only(
    overrides: list[str], predicted: bool
) -> None:
    """Oracle: the table, and the prediction on that profile."""
    config = composed(*overrides, device_type="cpu", world_size=2)
    estimate = estimate_run(config, 2)
    assert (estimate is not None) == predicted
    if estimate is not None:
        assert estimate == (
            predict(config, load_hardware("cpu"), 2),
            load_hardware("cpu"),
        )


def test_segment_kind_changes_reserved_memory() -> None:
    """Oracle: the estimate for each; a small model fills segments of 20 MiB badly."""
    configs = [composed(f"plan.allocator={kind.value}") for kind in AllocatorKind]
    assert (
        len(
            {
                fast_estimate(config, load_hardware("h100"), 8).memory.reserved_bytes
                for config in configs
            }
        )
        == 2
    )


@pytest.mark.parametrize(
    "overrides, ranks",
    [
        (["plan.world_size=48"], 48),
        ([], 8),
        (["parallel=single"], 1),
        (["launch.nnodes=3", "launch.rdzv_endpoint=a:1"], 24),
        (["launch.nproc_per_node=4"], 4),
    ],
)
def test_world_size_defaults_to_the_ranks_of_one_node(
    overrides: list[str], ranks: int
) -> None:
    """Oracle: the table, for machines of eight devices."""
    config = compose_config(["experiment=null", "plan.hardware=h100", *overrides])
    assert world_size_of(config, hardware_of(config)) == ranks


SHARED_NODES = (
    "mesh.fsdp_size=12 on nodes of 8 ranks has groups that lie across two nodes, so that every "
    "gather waits for the network between them; mesh.fsdp_size=node keeps each within one; the "
    "prediction assumes that each group starts at a node's first rank"
)
CUDNN = "plan.hardware=h200 assumes attention by cuDNN"
ONE_BY_ONE = "experts are assumed to be one matmul, but are multiplied one by one"


@pytest.mark.parametrize(
    ("hardware", "overrides", "ranks", "expected"),
    [
        ("h100", ("mesh.fsdp_size=8",), 1024, "time beyond 128 ranks is not validated"),
        (
            "h100",
            ("plan.memory_gib=500",),
            8,
            "plan.memory_gib=500 is over the 77.61 GiB that h100 leaves the",
        ),
        (
            "h100",
            ("parallel=fsdp1",),
            8,
            "only two steps are traced; reserved memory may grow in a third",
        ),
        (
            "h100",
            ("train.compile=true",),
            8,
            "train.compile=true is predicted as eager",
        ),
        (
            "h100",
            ("train.float8=rowwise", BF16),
            8,
            "train.float8=rowwise is predicted as bfloat16 matmuls",
        ),
        (
            "h100",
            ("kernels.rms_norm=compiled",),
            8,
            f"kernels.{COMPILED} are assumed to touch each tensor once",
        ),
        (
            "h100",
            (MOE, BF16),
            8,
            "experts are assumed to receive equal numbers of tokens",
        ),
        (
            "h100",
            (MOE, LAYOUT),
            8,
            f"{LAYOUT} is predicted for experts as the default mode",
        ),
        (
            "h100",
            (LAYOUT,),
            8,
            f"{LAYOUT} is predicted without its float64 tensors and matmuls of single grains",
        ),
        (
            "h100",
            ("plan.allocator=native",),
            8,
            "plan.allocator=native is predicted without fragmentation",
        ),
        # NPUs use torch_npu's grouped matmul by default; CUDA has a kernel for bfloat16.
        ("a2", (MOE, "kernels.grouped_matmul=torch"), 8, ONE_BY_ONE),
        ("h100", (MOE, "parallel.param_dtype=float32"), 8, ONE_BY_ONE),
        ("h200", (BF16,), 8, CUDNN),
        ("h200", (BF16, "kernels.attention=cudnn"), 8, CUDNN),
        # The costs start every group at a node.
        ("h100", ("mesh.fsdp_size=12",), 24, SHARED_NODES),
    ],
)
def test_caveats_are_reported_only_where_they_apply(
    hardware: str, overrides: tuple[str, ...], ranks: int, expected: str
) -> None:
    """Oracle: the expected message is there; without the setting it is not."""
    profile = load_hardware(hardware)
    sentences = caveats(
        composed(*overrides, device_type=profile.device_type, world_size=ranks),
        profile,
        ranks,
    )
    assert sum(sentence.startswith(expected) for sentence in sentences) == 1
    plain_overrides = {
        ONE_BY_ONE: (MOE, BF16),
        CUDNN: (BF16, "kernels.attention=flash"),
    }
    for plain in ((), plain_overrides.get(expected, ())):
        plain_sentences = caveats(
            composed(*plain, device_type=profile.device_type), profile, 8
        )
        assert not any(sentence.startswith(expected) for sentence in plain_sentences)


@pytest.mark.parametrize(
    ("name", "band"),
    [
        (
            "a2",
            "took 1.05 to 1.18 times as long as predicted for this trainer without offload",
        ),
        (
            "h100",
            "published steps of torchtitan took 1.14 and 1.19 times as long as predicted",
        ),
        (
            "h200",
            (
                "eight steps of Llama 3 1B and 8B on one device took 0.98 to 1.05 times as long as "
                "predicted"
            ),
        ),
        ("b200", "no published step was compared with its times"),
    ],
)
def test_caveat_names_the_errors_of_a_profiles_times(name: str, band: str) -> None:
    """Oracle: the tables of benchmarks/plan.md and gpu_planned.md; runs exist for three
    profiles."""
    (caveat,) = [
        sentence
        for sentence in caveats(composed(), load_hardware(name), 8)
        if band in sentence
    ]
    assert caveat.startswith(f"plan.hardware={name} assumes")


@pytest.mark.parametrize(
    "overrides, world_size, size",
    [
        ([], 16, 8),
        ([], 12, 6),
        ([], 4, 4),
        (["launch.nproc_per_node=4"], 16, 4),
        (["launch.nproc_per_node=4"], 2, 2),
    ],
)
def test_node_fsdp_size_uses_the_devices_of_the_hardware_profile(
    overrides: list[str], world_size: int, size: int
) -> None:
    """Oracle: the table, for machines of up to eight."""
    config = compose_config(
        ["experiment=null", "plan.hardware=h100", "mesh.fsdp_size=node", *overrides]
    )
    validate_switches(
        config,
        world_size,
        "cuda",
        node_ranks_of(config, load_hardware("h100"), world_size),
    )
    assert config.mesh.fsdp_size == size


@pytest.mark.parametrize(
    "overrides, depths",
    [
        (["model=llama2_7b"], [8, 12]),
        (["model=llama3_405b"], [8, 23]),
        # Every fourth layer of Scout attends to all positions, the others to chunks.
        (["model=llama4_scout"], [8, 16]),
        # 5 layers without checkpointing, then periods of 3: 14 has three of them, and 80 has 22
        # more.
        (
            [
                "model=llama3_70b",
                "memory.gradient_checkpointing=full",
                "memory.checkpointing_every=3",
                "memory.checkpointing_start_index=5",
            ],
            [14, 26],
        ),
        (["model=llama_debug"], [2]),
        (["model=llama2_7b", "model.n_layers=20"], [20]),
    ],
)
def test_traced_depths_differ_by_full_periods_of_the_model(
    overrides: list[str], depths: list[int]
) -> None:
    """Oracle: the table; the last depth and the model's differ by full periods."""
    config = compose_config(overrides)
    with torch.device("meta"):
        assert depths_of(config, config.model.build(), 8) == depths


@dataclass(frozen=True)
class Figures:
    """A replay's kinds of values."""

    name: str
    bytes: int
    seconds: float
    by_stream: dict[str, int] = field(default_factory=dict)
    phases: tuple["Figures", ...] = ()


def figures(n_layers: int) -> Figures:
    inner = Figures("forward", 100 * n_layers, 2.0 * n_layers)
    streams = {"compute": 5 + n_layers} | (
        {"late": n_layers - 4} if n_layers > 4 else {}
    )
    return Figures(
        "step", 7 + 3 * n_layers, 0.5 + 0.25 * n_layers, streams, (inner, inner)
    )


def test_extrapolation_is_exact_for_linear_values() -> None:
    """Oracle: the same linear formulas at that depth; a key missing at the shallow depth counts as
    zero."""
    assert extrapolate(figures(4), figures(6), (4, 6), 32) == figures(32)
