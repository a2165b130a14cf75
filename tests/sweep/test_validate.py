"""Combinations are validated as their jobs would be, and equal runs recognized."""

import copy
import importlib.util
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

import fsdptoys
from fsdptoys.config.choices import list_choices
from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.launch.launch import resolve_run
from fsdptoys.sweep import validate as module
from fsdptoys.sweep.axes import Combination, combine, read_base
from fsdptoys.sweep.definition import list_sweeps, read_definition
from fsdptoys.sweep.validate import (
    InvalidJob,
    JobHardware,
    LocalMachine,
    ValidJob,
    fingerprint,
    validate_combinations,
)
from tests.harness.levels import extended
from tests.harness.run_tables import one_in
from tests.sweep.jobs import axes

CHOICES = list_choices()
SMALL = ["model=llama_debug", "train.seq_len=64"]


class Imagined(LocalMachine):
    """Eight imaginary CUDA devices."""

    def find(self, overrides: Sequence[str], settings: Config) -> JobHardware:
        """Eight of them, unless the run is one process."""
        ranks = 1 if settings.parallel.name == "single" else 8
        return JobHardware("cuda", "imagined", ranks, ranks)


def of_words(*overrides: str) -> list[Combination]:
    return combine([], [], axes(*overrides))


def of_sweep(name: str, *overrides: str) -> list[Combination]:
    base, rows = read_base(read_definition(name), name, CHOICES)
    return combine(base, rows, axes(*overrides))


@pytest.mark.parametrize("name", list_sweeps())
@pytest.mark.parametrize(
    "machine",
    [
        extended(LocalMachine(), id="two CPU ranks"),
        pytest.param(Imagined(), id="eight CUDA devices"),
    ],
)
def test_every_combination_of_a_shipped_sweep_is_valid_or_skipped_with_a_reason(
    name: str, machine: LocalMachine
) -> None:
    """Oracle: none is an invalid configuration; on eight devices as in the file, on a CPU with a
    small model."""
    on_cpu = type(machine) is LocalMachine
    validated = validate_combinations(
        of_sweep(name, *(SMALL if on_cpu and name != "debug" else [])), machine
    )
    refused = [one for one in validated if isinstance(one, InvalidJob)]
    assert not [one for one in refused if one.by_composition]
    assert len(validated) - len(refused) >= 3
    if name.startswith("classic") or name == "debug":
        assert len(validated) == 8
        reasons = {one.reason for one in refused}
        assert len(refused) == 2 * (on_cpu and name == "classic_fsdp1")
        assert all(
            "needs an accelerator to offload from under parallel=fsdp1" in reason
            for reason in reasons
        )


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_classic_sweep_has_the_rows_of_the_published_table(strategy: str) -> None:
    """Oracle: the first table's columns: wrap, gradient checkpointing, chunked loss, optimizer
    offload, CPU offload."""
    rows = []
    for one in validate_combinations(of_sweep(f"classic_{strategy}"), Imagined()):
        assert isinstance(one, ValidJob) and one.config.parallel.name == strategy
        memory = one.config.memory
        checkpointed = memory.gradient_checkpointing.value == "full"
        switches = (memory.chunk_loss, memory.optimizer_offload, memory.cpu_offload)
        rows.append((one.config.parallel.wrap.value, checkpointed, *switches))
    assert rows == [
        ("block", False, False, False, False),
        ("block", True, False, False, False),
        ("block", True, True, False, False),
        ("block", True, True, True, False),
        ("block", True, True, False, True),
        ("block_attn_mlp", True, True, False, True),
        ("block_attn_mlp", False, False, False, False),
        ("block_attn_mlp", True, False, False, False),
    ]


def test_combination_equals_the_run_of_its_job() -> None:
    """Oracle: the launcher's ``resolve_run`` composes the same tree and ranks from the same
    arguments."""
    overrides = [
        *("parallel=fsdp1,single", "optim.lr=1e-3", "data=text", "data.files=[stdlib]"),
        *(
            "train.max_grad_norm=null",
            "train.max_seconds=${train.steps}",
            "model.rope_theta=5000",
        ),
        *("memory.checkpointing_save=[mm]", "memory.gradient_checkpointing=selective"),
        *("plan.predict=false", "data.sample_prompt='a, b'"),
    ]
    for one in validate_combinations(of_words(*overrides)):
        assert isinstance(one, ValidJob)
        plan = resolve_run(one.combination.overrides, {})
        expected = plan.composition.config.to_dict()
        expected["launch"]["device"] = "auto"
        assert one.config.to_dict() == expected
        assert one.world_size == plan.world_size


def test_switches_chosen_by_the_planner_are_refused_in_a_sweep() -> None:
    """Oracle: the message; the other combination runs."""
    auto, lean = validate_combinations(
        of_words("model=llama_debug", "memory=auto,lean")
    )
    assert isinstance(auto, InvalidJob) and auto.reason.startswith(
        "memory=auto is chosen for one run on its devices"
    )
    assert isinstance(lean, ValidJob)


REFUSED = {
    "memory.cpu_offload=true,false memory.optimizer_offload=true": (True, False),
    "mesh.fsdp_size=2,3,-1": (False, True, False),
    "memory=none,cpu_offload parallel=fsdp2,ddp": (False, False, False, True),
    "launch.nproc_per_node=2,100000": (False, True),
}


@pytest.mark.parametrize("overrides", one_in(3, REFUSED))
def test_combinations_that_contradict_other_arguments_or_the_machine_are_skipped(
    overrides: str,
) -> None:
    """Oracle: each of these arguments is valid in another combination or on another machine."""
    validated = validate_combinations(of_words("model=llama_debug", *overrides.split()))
    assert tuple(isinstance(one, InvalidJob) for one in validated) == REFUSED[overrides]
    assert all(len(one.reason) > 30 for one in validated if isinstance(one, InvalidJob))


BASELINES = {
    "memory.optimizer_offload=false,true memory.offload_schedule=serial,lazy": (
        "false|true serial|true lazy"
    ),
    "memory.gradient_checkpointing=none,full memory.checkpointing_start_index=0,1": (
        "none 0|full 0|full 1"
    ),
    "memory=none,lean memory.chunk_tokens=16,32": "none|lean 16|lean 32",
    "parallel=ddp,fsdp2 parallel.wrap=block,block_attn_mlp": "ddp|fsdp2 block|fsdp2 block_attn_mlp",
    "optim=adamw,sgd optim.momentum=0,0.9": "adamw|sgd 0|sgd 0.9",
}


@pytest.mark.parametrize("overrides", one_in(3, BASELINES))
def test_keys_without_effect_are_dropped_and_leave_one_baseline(overrides: str) -> None:
    """Oracle: the rows by hand; where the switch is off, the keys that depend on it distinguish no
    runs."""
    validated = validate_combinations(of_words("model=llama_debug", *overrides.split()))
    assert all(isinstance(one, ValidJob) for one in validated)
    assert (
        "|".join(" ".join(one.combination.varied.values()) for one in validated)
        == BASELINES[overrides]
    )


@pytest.mark.parametrize(
    ("overrides", "limit"), [((), None), (("train.max_seconds=60",), 60.0)]
)
def test_experiments_time_limit_does_not_end_jobs_at_different_steps(
    overrides: tuple[str, ...], limit: float | None
) -> None:
    """Oracle: the default experiment has 700 steps and a limit, which a sweep drops unless it is
    typed."""
    validated = validate_combinations(
        of_words("parallel=fsdp1,fsdp2", *overrides), LocalMachine()
    )
    for one in validated:
        assert isinstance(one, ValidJob)
        run = resolve_run(list(one.combination.overrides), {}).composition.config
        assert run.train.max_seconds == limit
        assert (one.config.train.steps, one.config.train.max_seconds) == (700, limit)


def config(*overrides: str) -> Config:
    settings = compose_config(["model=llama_debug", "data=synthetic", *overrides])
    settings.validate(2, "cpu")
    return settings


@pytest.fixture(scope="module")
def base() -> Config:
    return config()


WITH_EFFECT = (
    "train.steps=11",
    "mesh.fsdp_size=1",
    "parallel=ddp",
    "train.seed=1",
    "patches=[]",
)


@pytest.mark.parametrize(
    "word",
    [
        *("metrics.run_dir=elsewhere", "launch.nproc_per_node=2", "mesh.fsdp_size=2"),
        *("train.data_seed=0", "parallel.reduce_dtype=float32", *WITH_EFFECT),
    ],
)
def test_settings_with_effect_alone_distinguish_runs(base: Config, word: str) -> None:
    """Oracle: none have output paths, and explicit values equal to those that ``auto`` or a default
    resolves to."""
    is_same = fingerprint(config(word), 2, "a CPU") == fingerprint(base, 2, "a CPU")
    assert is_same == (word not in WITH_EFFECT)


def test_ranks_device_and_versions_are_included(
    base: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the same configuration on another device, rank count or version is another run."""
    numbers = {
        fingerprint(base, 2, "a CPU"),
        fingerprint(base, 4, "a CPU"),
        fingerprint(base, 2, "another"),
    }
    monkeypatch.setattr(module, "code_version", lambda: "another commit")
    numbers.add(fingerprint(base, 2, "a CPU"))
    monkeypatch.setattr(module.torch, "__version__", "another version")
    numbers.add(fingerprint(base, 2, "a CPU"))
    assert len(numbers) == 5
    monkeypatch.undo()
    assert fingerprint(copy.deepcopy(base), 2, "a CPU") in numbers


def test_changed_checkout_is_recognized_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: two changes on top of one commit: git calls both dirty, the files differ."""
    package = tmp_path / "fsdptoys"
    changed = package / "toys" / "fsdp" / "units.py"
    changed.parent.mkdir(parents=True)
    for path in (package / "__init__.py", changed):
        path.write_text("")
    for argv in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *argv], check=True)
    monkeypatch.setattr(fsdptoys, "__file__", str(package / "__init__.py"))
    versions = []
    for text in ("", "a = 1\n", "a = 2\n"):
        changed.write_text(text)
        versions.append(module.code_version.__wrapped__())
    assert len(set(versions)) == 3
    assert "-dirty" not in versions[0] and "-dirty" in versions[1]


def test_requirements_of_writers_are_checked_before_the_first_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Oracle: without credentials for Weights & Biases only the combination that stays offline is
    left."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    online, offline = validate_combinations(
        of_words(
            "model=llama_debug", "metrics=wandb", "metrics.wandb_mode=online,offline"
        )
    )
    assert (
        isinstance(online, InvalidJob)
        and "needs an API key for Weights & Biases" in online.reason
    )
    assert isinstance(offline, ValidJob)
