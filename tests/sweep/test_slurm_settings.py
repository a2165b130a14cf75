"""Settings for a batch queue: the options of the batch script. Refusals are in ``tests/messages``."""

from pathlib import Path

import pytest
from submitit.slurm.slurm import _make_sbatch_string

from fsdptoys.config.compose import compose_config
from fsdptoys.errors import ConfigError
from fsdptoys.sweep.axes import Combination
from fsdptoys.sweep.slurm_settings import (
    LOCAL,
    SlurmNeeds,
    find_needs,
    plugin_options,
    read_launcher,
    split_launcher_words,
)
from fsdptoys.sweep.validate import BatchQueue, JobHardware, ValidJob, validate_combinations
from tests.sweep.jobs import CUDA, ON_SLURM


def test_machine_without_slurm_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Oracle: the expected message, with an empty PATH."""
    read_launcher.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^hydra/launcher=submitit_slurm needs sbatch, which is not on this machine"):
        read_launcher((ON_SLURM,))


def test_nodes_on_this_machine_alone_are_refused() -> None:
    """Oracle: the expected message."""
    with pytest.raises(ConfigError) as refusal:
        find_needs(("launch.nnodes=2",), LOCAL)
    assert str(refusal.value) == (
        "launch.nnodes=2 needs other machines, and hydra/launcher=submitit_local has this one alone; set "
        "hydra/launcher=submitit_slurm"
    )


@pytest.mark.parametrize(
    ("needs", "typed", "limit", "expected"),
    [
        (SlurmNeeds(2, 8, "cuda"), "", None, {"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8"}),
        (SlurmNeeds(2, 8, "cuda"), "", None, {"time": "60"}),
        (SlurmNeeds(1, 4, "cpu"), "", None, {"nodes": "1", "cpus-per-task": "4", "gpus-per-node": None}),
        # 600 s of the job, 120 s between the signal and the limit, 60 s before the launcher starts
        (SlurmNeeds(1, 4, "cpu"), "", 600.0, {"time": "13"}),
        (SlurmNeeds(1, 4, "cpu"), "timeout_min=30", 600.0, {"time": "30"}),
        (SlurmNeeds(1, 8, "cuda"), "gres='gpu:h100:8'", None, {"gres": "gpu:h100:8", "gpus-per-node": None}),
        (SlurmNeeds(1, 4, "cpu"), "cpus_per_task=16", None, {"cpus-per-task": "16", "signal": "USR1@120"}),
        (SlurmNeeds(1, 4, "cpu"), "signal_delay_s=30", None, {"signal": "USR1@30"}),
        (
            SlurmNeeds(1, 4, "cpu"),
            "additional_parameters.reservation=maintenance",
            None,
            {"reservation": "maintenance", "signal": "USR1@120"},
        ),
    ],
)
def test_options_of_the_batch_script_come_from_the_run(
    needs: SlurmNeeds,
    typed: str,
    limit: float | None,
    expected: dict[str, str | None],
    slurm_commands: Path,
) -> None:
    """Oracle: the ``#SBATCH`` lines that submitit writes for the same options."""
    words = [f"{'+' * typed.startswith('additional')}hydra.launcher.{typed}"] if typed else []
    launcher = read_launcher((ON_SLURM, *words))
    options = {**launcher.options, **plugin_options(needs, launcher, limit)}
    renamed = {"timeout_min": "time", "tasks_per_node": "ntasks_per_node", "name": "job_name"}
    left_out = {"_target_", "submitit_folder", "max_num_timeout", "mem_gb"}
    script = _make_sbatch_string(
        "true",
        "folder",
        **{renamed.get(key, key): value for key, value in options.items() if key not in left_out and value is not None},
    )
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH --")]
    written = dict(line.partition("=")[::2] for line in lines)
    assert {key: written.get(key) for key in expected} == expected


def test_user_setup_follows_that_of_the_task(slurm_commands: Path) -> None:
    """Oracle: the typed list."""
    launcher = read_launcher((ON_SLURM, "hydra.launcher.setup=['module load cuda']"))
    setup = plugin_options(SlurmNeeds(1, 1, "cpu"), launcher, None)["setup"]
    assert setup[-1] == "module load cuda" and any("SRUN_CPUS_PER_TASK" in line for line in setup[:-1])


def test_login_node_needs_none_of_the_jobs_devices(slurm_commands: Path) -> None:
    """Oracle: a run of 2 × 8 GPUs, on a machine that may have none; the queue chooses the rendezvous node."""
    words, queue = (
        (*CUDA, "launch.nnodes=2", "parallel=fsdp2"),
        BatchQueue((ON_SLURM, "hydra.launcher.partition=gpu"), None),
    )
    place = queue.find(words, compose_config([*words, *queue.extra_words]))
    assert place == JobHardware("cuda", "submitit_slurm partition=gpu", 16, 8)
    (job,) = validate_combinations([Combination(words, {})], queue)
    assert isinstance(job, ValidJob) and job.world_size == 16 and job.config.model.name == "llama2_7b"
    assert not any("rdzv_endpoint" in word for word in job.combination.words)


def test_launcher_arguments_are_separated_from_those_of_the_run() -> None:
    """Oracle: the typed arguments, in their order."""
    words = ["parallel=fsdp1,fsdp2", "hydra/launcher=submitit_slurm", "+hydra.launcher.additional_parameters.x=1"]
    assert split_launcher_words(words) == (words[:1], words[1:])
    assert split_launcher_words(["hydra.run.dir=x"]) == (["hydra.run.dir=x"], [])
