"""Model and memory switches that the planner chooses for a run."""

import dataclasses

import pytest

from fsdptoys.cli.planned import choose_largest, choose_switches, device_memory
from fsdptoys.config.compose import compose_config
from fsdptoys.device.free_memory import least_free_bytes
from fsdptoys.device.profile import load_hardware
from fsdptoys.launch.launch import resolve_run
from fsdptoys.plan.estimate.estimate import closed_form
from fsdptoys.plan.search.switches import count_parameters


@pytest.mark.usefixtures("unmeasured")
def test_default_run_trains_the_largest_model_that_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: AdamW's step takes 16 to 20 bytes a parameter. On 8 H100, less the margin, 71.3 GiB each are left: enough
    for 14.8 billion of one preset (34 GiB at most), not for 32.8 with activations. A CPU has its own experiment.
    """
    assert resolve_run(["launch.device=cpu"], {}).composition.choices["experiment"] == "cpu_text"
    monkeypatch.setattr("fsdptoys.cli.planned.profile_of_this_machine", lambda: "h100")
    monkeypatch.setattr("fsdptoys.cli.planned.least_free_bytes", lambda *_: None)
    words = choose_largest("experiment=llama2_7b", "cuda", 8)
    config = compose_config(words)
    config.validate(8, "cuda")
    assert words[0] == "experiment=llama2_7b" and 14e9 < count_parameters(config.model) < 32e9
    reserved_gib = closed_form(config, load_hardware("h100"), 8).memory.reserved_bytes / 2**30
    assert reserved_gib < 77.61 - 0.08 * 79.11
    assert (
        f"is predicted to need {reserved_gib:.1f} GiB of 77.6 GiB available on each device, with a margin of 6.3 GiB "
        "(8% of its memory until outside_allocator_bytes of h100 is measured)" in capsys.readouterr().out
    )


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
    free_gib: float | None, source: str, available_gib: float, margin_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: by hand, from the 79.11 GiB of an H100 and 1.5 GiB outside the allocator; under torchrun the free memory,
    in which ranks may differ, is not asked for."""
    hardware = load_hardware("h100")
    hardware = dataclasses.replace(
        hardware, outside_allocator_bytes=dataclasses.replace(hardware.outside_allocator_bytes, source=source)
    )
    monkeypatch.setattr("fsdptoys.cli.planned.profile_of_this_machine", lambda: "h100")
    monkeypatch.setattr("fsdptoys.cli.planned.load_hardware", lambda name: hardware)
    monkeypatch.setattr("fsdptoys.cli.planned.least_free_bytes", lambda *_: free_gib and int(free_gib * 2**30))
    memory = device_memory("cuda", 8)
    assert memory is not None
    assert memory.available_bytes / 2**30 == pytest.approx(available_gib, abs=0.01)
    assert (memory.available_bytes - memory.limit_bytes) / 2**30 == pytest.approx(margin_gib, abs=0.01)
    monkeypatch.setenv("RANK", "1")
    memory = device_memory("cuda", 8)
    assert memory is not None and memory.available_bytes / 2**30 == pytest.approx(77.61, abs=0.01)
    assert device_memory("cpu", 2) is None


@pytest.mark.extended
def test_free_memory_without_a_device_is_unknown() -> None:
    """Oracle: a machine without CUDA, whose query fails."""
    assert least_free_bytes("cuda", 64) is None


@pytest.mark.usefixtures("unmeasured")
def test_named_model_takes_the_fastest_memory_switches_unless_it_sets_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the closed form of each checkpointing mode and chunking, over one H200, whose memory all of them fit."""
    hardware = load_hardware("h200")
    monkeypatch.setattr("fsdptoys.cli.planned.profile_of_this_machine", lambda: "h200")
    monkeypatch.setattr("fsdptoys.cli.planned.least_free_bytes", lambda *_: None)
    words = ["experiment=llama3_1b", "train.seq_len=2048"]

    def speed(*more: str) -> float:
        config = compose_config([*words, *more])
        config.validate(1, "cuda")
        return closed_form(config, hardware, 1).tokens_per_second

    def choose(*more: str) -> list[str]:
        given = [*words, *more]
        return choose_switches(given, compose_config(given), "cuda", 1, 1)

    chosen = choose()
    assert chosen and all(word.startswith("memory.") for word in chosen)
    best = max(
        speed(f"memory.gradient_checkpointing={mode}", f"memory.chunk_loss={chunk}")
        for mode in ("none", "selective", "full")
        for chunk in ("true", "false")
    )
    assert speed(*chosen) >= 0.99 * best > speed()
    assert f"{' '.join(chosen)}: the fastest of those that fit, predicted to need" in capsys.readouterr().out
    for own in ("memory.chunk_loss=true", "memory=lean", "plan.predict=false", "parallel=toy_fsdp"):
        assert choose(own) == []
    monkeypatch.setattr("fsdptoys.cli.planned.profile_of_this_machine", lambda: None)
    assert choose() == []
