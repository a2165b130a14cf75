"""``fsdptoys plan`` on the command line, and what the planner chooses for a run."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from fsdptoys.cli.main import main
from fsdptoys.cli.plan import compose_hypothetical
from fsdptoys.cli.planned import choose_largest, choose_switches, device_memory
from fsdptoys.config.compose import compose_config
from fsdptoys.device.profile import load_hardware
from fsdptoys.launch.launch import resolve_run
from fsdptoys.plan.estimate.estimate import fast_estimate
from fsdptoys.plan.search.switches import count_parameters

TINY = [
    "model=llama_debug",
    "experiment=null",
    "train.seq_len=128",
    "plan.hardware=h100",
]


@pytest.mark.usefixtures("unmeasured")
def test_memory_at_the_end_of_a_step_is_12_bytes_per_sharded_parameter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: float32 parameter and two states of AdamW over 8 ranks, and a workspace of cuBLAS for
    each of 2 threads, 32 MiB on Hopper (torch.backends.cuda, CUBLAS_WORKSPACE_CONFIG); at most 10%
    more for small tensors."""
    assert (
        main(
            [
                "plan",
                *TINY,
                "model.dim=512",
                "model.ffn_dim=1408",
                "plan.world_size=8",
                "--json",
            ]
        )
        == 0
    )
    output = json.loads(capsys.readouterr().out)
    config = compose_config([*TINY, "model.dim=512", "model.ffn_dim=1408"])
    with torch.device("meta"):
        parameters = config.model.build().parameter_counts().total
    state_bytes = 12 * parameters / 8
    assert state_bytes <= output["memory"]["end_bytes"] - 2 * 2**25 < 1.1 * state_bytes
    assert output["world_size"] == 8 and output["method"] == "estimated"
    parts = ("compute", "exposed_communication", "exposed_transfer", "host")
    assert sum(output["time"][f"{part}_seconds"] for part in parts) == pytest.approx(
        output["time"]["step_seconds"]
    )
    assert output["memory_limit_bytes"] == round(load_hardware("h100").usable_bytes)


@pytest.mark.usefixtures("unmeasured")
def test_search_prints_overrides_accepted_by_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the configuration composed from the printed overrides, and the written plot."""
    picture = tmp_path / "frontier.png"
    argv = [
        "plan",
        "search",
        *TINY,
        "parallel=fsdp2",
        "train.batch_size=4",
        "plan.world_size=8",
        "mesh.fsdp_size=8",
    ]
    argv += [
        "memory.cpu_offload=false",
        "memory.optimizer_offload=false",
        "memory.gradient_checkpointing=full",
    ]
    argv += ["parallel.wrap=block", "parallel.reshard_after_forward=default"]
    assert main([*argv, "--json", "--png", str(picture)]) == 0
    output = json.loads(capsys.readouterr().out)
    best = compose_config(output["best"]["words"])
    best.validate(8, "cuda")
    assert (best.parallel.name, best.train.batch_size, best.model.name) == (
        "fsdp2",
        4,
        "llama_debug",
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


ONE = ["model=llama3_1b", "plan.hardware=h200", "plan.world_size=1"]


@pytest.mark.parametrize(
    ("overrides", "searches", "strategy"),
    [
        (ONE, False, "single"),
        (["experiment=null", *ONE], False, "single"),
        ([*ONE, "parallel=fsdp2"], False, "fsdp2"),
        ([*ONE, "memory.cpu_offload=true"], False, "fsdp2"),
        ([*ONE[:2], "plan.world_size=2"], False, "fsdp2"),
        (ONE, True, "fsdp2"),
    ],
)
def test_plan_of_one_rank_shards_nothing(
    overrides: list[str], searches: bool, strategy: str
) -> None:
    """Oracle: the strategy with which ``fsdptoys train`` runs one rank on an accelerator; a search
    varies it."""
    run = compose_hypothetical(overrides, searches=searches)
    assert run.config.parallel.name == strategy
    assert ("parallel=single" in run.overrides) == (strategy == "single")


@pytest.mark.usefixtures("unmeasured")
def test_default_run_trains_the_largest_model_that_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: AdamW's step takes 16 to 20 bytes a parameter. On 8 H100, less the margin, 71.3 GiB
    each are left: enough for 14.8 billion of one preset (34 GiB at most), not for 32.8 with
    activations. A CPU has its own experiment.
    """
    assert (
        resolve_run(["launch.device=cpu"], {}).composition.choices["experiment"]
        == "cpu_text"
    )
    monkeypatch.setattr("fsdptoys.cli.planned.profile_of_this_machine", lambda: "h100")
    monkeypatch.setattr("fsdptoys.cli.planned.least_free_bytes", lambda *_: None)
    overrides = choose_largest("experiment=llama2_7b", "cuda", 8)
    config = compose_config(overrides)
    config.validate(8, "cuda")
    assert (
        overrides[0] == "experiment=llama2_7b"
        and 14e9 < count_parameters(config.model) < 32e9
    )
    reserved_gib = (
        fast_estimate(config, load_hardware("h100"), 8).memory.reserved_bytes / 2**30
    )
    assert reserved_gib < 77.61 - 0.08 * 79.11
    assert (
        f"is predicted to need {reserved_gib:.1f} GiB of 77.6 GiB available on each device, with "
        "a margin of 6.3 GiB (8% of its memory until outside_allocator_bytes of h100 is measured)"
    ) in capsys.readouterr().err


@pytest.mark.parametrize(
    "free_gib, source, available_gib, margin_gib",
    [
        (None, "assumed: 1.5 GiB", 77.61, 6.33),
        (79.0, "assumed: 1.5 GiB", 77.61, 6.33),
        (40.0, "assumed: 1.5 GiB", 40.0, 6.33),
        (40.0, "measured: 1.5 GiB", 40.0, 1.58),
    ],
)
def test_margin_and_free_memory_limit_a_choice(
    free_gib: float | None,
    source: str,
    available_gib: float,
    margin_gib: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: by hand, from the 79.11 GiB of an H100 and 1.5 GiB outside the allocator; under
    torchrun the free memory, in which ranks may differ, is not asked for."""
    hardware = load_hardware("h100")
    hardware = dataclasses.replace(
        hardware,
        outside_allocator_bytes=dataclasses.replace(
            hardware.outside_allocator_bytes, source=source
        ),
    )
    monkeypatch.setattr("fsdptoys.cli.planned.profile_of_this_machine", lambda: "h100")
    monkeypatch.setattr("fsdptoys.cli.planned.load_hardware", lambda name: hardware)
    monkeypatch.setattr(
        "fsdptoys.cli.planned.least_free_bytes",
        lambda *_: free_gib and int(free_gib * 2**30),
    )
    memory = device_memory("cuda", 8)
    assert memory is not None
    assert memory.available_bytes / 2**30 == pytest.approx(available_gib, abs=0.01)
    assert (memory.available_bytes - memory.limit_bytes) / 2**30 == pytest.approx(
        margin_gib, abs=0.01
    )
    monkeypatch.setenv("RANK", "1")
    memory = device_memory("cuda", 8)
    assert memory is not None and memory.available_bytes / 2**30 == pytest.approx(
        77.61, abs=0.01
    )
    assert device_memory("cpu", 2) is None


@pytest.mark.usefixtures("unmeasured")
def test_memory_auto_takes_the_fastest_switches_that_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the estimate of each checkpointing mode and chunking, over one H200. All of them
    fit its memory."""
    hardware = load_hardware("h200")
    monkeypatch.setattr("fsdptoys.cli.planned.profile_of_this_machine", lambda: "h200")
    monkeypatch.setattr("fsdptoys.cli.planned.least_free_bytes", lambda *_: None)
    overrides = ["experiment=llama3_1b", "train.seq_len=2048"]

    def speed(*more: str) -> float:
        config = compose_config([*overrides, *more])
        config.validate(1, "cuda")
        return fast_estimate(config, hardware, 1).tokens_per_second

    def choose(*more: str) -> list[str]:
        all_overrides = [*overrides, *more]
        return choose_switches(
            all_overrides, compose_config(all_overrides), "cuda", 1, 1
        )

    chosen = choose()
    assert chosen and all(word.startswith("memory.") for word in chosen)
    best = max(
        speed(f"memory.gradient_checkpointing={mode}", f"memory.chunk_loss={chunk}")
        for mode in ("none", "selective", "full")
        for chunk in ("true", "false")
    )
    assert speed(*chosen) >= 0.99 * best > speed()
    sentence = f"memory=auto: {' '.join(chosen)}, the fastest of those that fit, predicted to need"
    assert sentence in capsys.readouterr().err
    assert not any(
        "chunk_loss" in word
        for word in choose("memory=auto", "memory.chunk_loss=false")
    )
    assert choose("parallel=toy_fsdp") == []
    assert (
        "memory=auto leaves the switches off: parallel=toy_fsdp cannot be predicted"
        in capsys.readouterr().err
    )
    monkeypatch.setattr("fsdptoys.cli.planned.profile_of_this_machine", lambda: None)
    assert choose("plan.hardware=h200") == chosen
    assert choose() == []
    assert (
        "memory=auto chooses nothing on this device, which has no hardware profile,"
        in capsys.readouterr().err
    )
