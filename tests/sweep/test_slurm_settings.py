"""Settings for a batch queue: refusals in one sentence, and the options of the batch script."""

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
    launching_words,
    plugin_options,
    read_launcher,
    split_launcher_words,
)
from fsdptoys.sweep.validate import BatchQueue, JobHardware, ValidJob, validate_combinations
from tests.sweep.jobs import CUDA, ON_SLURM


@pytest.mark.parametrize(
    ("words", "launcher_words", "message"),
    [
        (
            CUDA,
            ("hydra.launcher.partition=gpu",),
            "hydra.launcher.partition=gpu is of no use without a launcher; add hydra/launcher=submitit_slurm",
        ),
        (
            CUDA,
            ("hydra/launcher=submitit_slrum",),
            "hydra/launcher=submitit_slrum must be submitit_slurm or submitit_local; did you mean submitit_slurm?",
        ),
        (
            CUDA,
            ("hydra/launcher=joblib",),
            "hydra/launcher=joblib must be submitit_slurm or submitit_local; leave it out to run the jobs here, one "
            "after another",
        ),
        (
            CUDA,
            (ON_SLURM, f"hydra/launcher={LOCAL}"),
            "hydra/launcher=submitit_slurm hydra/launcher=submitit_local names 2 launchers, but all jobs go to one; "
            "keep one of them",
        ),
        (
            CUDA,
            (ON_SLURM, "hydra.launcher.partitoin=gpu"),
            "hydra.launcher.partitoin=gpu is no option of hydra/launcher=submitit_slurm; did you mean "
            "hydra.launcher.partition?",
        ),
        (
            CUDA,
            (ON_SLURM, "hydra.launcher.partition=gpu,cpu"),
            "hydra.launcher.partition=gpu,cpu gives several values, but all jobs go to one launcher; keep one of them",
        ),
        (
            CUDA,
            (ON_SLURM, "hydra.launcher.tasks_per_node=8"),
            "hydra.launcher.tasks_per_node=8 cannot be set, since one task on a node starts its launch.nproc_per_node "
            "ranks; leave it out",
        ),
        (
            CUDA,
            (ON_SLURM, "hydra.launcher.max_num_timeout=2"),
            "hydra.launcher.max_num_timeout=2 cannot be set, since a job of a sweep restarts from the beginning and "
            "would run out of time again; leave it out",
        ),
        (
            CUDA,
            (ON_SLURM, "hydra.launcher.nodes=2"),
            "hydra.launcher.nodes=2 and launch.nnodes=1 contradict each other; leave out hydra.launcher.nodes",
        ),
        (
            CUDA,
            (ON_SLURM, "hydra.launcher.gpus_per_node=4"),
            "hydra.launcher.gpus_per_node=4 is under launch.nproc_per_node=8; leave out hydra.launcher.gpus_per_node",
        ),
        (
            CUDA,
            (ON_SLURM, "hydra.launcher.timeout_min=5"),
            "hydra.launcher.timeout_min=5 ends jobs before their own limit of 600 s; set hydra.launcher.timeout_min=13",
        ),
        (
            ("launch.nproc_per_node=8",),
            (ON_SLURM,),
            "hydra/launcher=submitit_slurm runs jobs on machines that are not looked at before, so their devices must "
            "be named; add launch.device=cuda (or npu, or cpu)",
        ),
        (
            ("launch.device=cuda",),
            (ON_SLURM,),
            "hydra/launcher=submitit_slurm runs jobs on machines that are not looked at before, so the ranks on each "
            "must be named; add launch.nproc_per_node=8",
        ),
        (
            (*CUDA, "launch.nnodes=2", "launch.rdzv_endpoint=here:29400"),
            (ON_SLURM,),
            "launch.rdzv_endpoint=here:29400 is for machines that are known before; leave it out, the queue chooses "
            "them",
        ),
        (
            ("launch.nnodes=2",),
            (f"hydra/launcher={LOCAL}",),
            "launch.nnodes=2 needs other machines, and hydra/launcher=submitit_local has this one alone; set "
            "hydra/launcher=submitit_slurm",
        ),
        (
            (*CUDA, "train.seq_len=64", "mesh.fsdp_size=3"),
            (ON_SLURM,),
            None,  # the run's own mistake, with its usual message
        ),
    ],
)
def test_invalid_submissions_are_reported_in_one_sentence(
    words: tuple[str, ...], launcher_words: tuple[str, ...], message: str | None, slurm_commands: Path
) -> None:
    """Oracle: the expected messages as a user should read them."""
    with pytest.raises(ConfigError) as refusal:
        launcher = read_launcher(launcher_words)
        plugin_options(find_needs(launching_words(words), launcher.name), launcher, 600)
        validate_combinations([Combination(("model=llama_debug", *words), {})], BatchQueue(launcher_words, 600))
    if message is None:
        assert str(refusal.value).startswith("mesh.fsdp_size=3 ")
    else:
        assert str(refusal.value) == message


def test_machine_without_slurm_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Oracle: the expected message, with an empty PATH."""
    read_launcher.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^hydra/launcher=submitit_slurm needs sbatch, which is not on this machine"):
        read_launcher((ON_SLURM,))


@pytest.mark.parametrize(
    ("needs", "typed", "limit", "expected"),
    [
        (
            SlurmNeeds(2, 8, "cuda"),
            (),
            None,
            {"nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8", "time": "60"},
        ),
        (SlurmNeeds(1, 4, "cpu"), (), None, {"nodes": "1", "cpus-per-task": "4", "gpus-per-node": None}),
        # 600 s of the job, 120 s between the signal and the limit, 60 s before the launcher starts
        (SlurmNeeds(1, 4, "cpu"), (), 600.0, {"time": "13"}),
        (SlurmNeeds(1, 4, "cpu"), ("hydra.launcher.timeout_min=30",), 600.0, {"time": "30"}),
        (
            SlurmNeeds(1, 8, "cuda"),
            ("hydra.launcher.gres='gpu:h100:8'",),
            None,
            {"gres": "gpu:h100:8", "gpus-per-node": None},
        ),
        (
            SlurmNeeds(1, 4, "cpu"),
            ("hydra.launcher.cpus_per_task=16",),
            None,
            {"cpus-per-task": "16", "signal": "USR1@120"},
        ),
        (SlurmNeeds(1, 4, "cpu"), ("hydra.launcher.signal_delay_s=30",), None, {"signal": "USR1@30"}),
        (
            SlurmNeeds(1, 4, "cpu"),
            ("+hydra.launcher.additional_parameters.reservation=maintenance",),
            None,
            {"reservation": "maintenance", "signal": "USR1@120"},
        ),
    ],
)
def test_options_of_the_batch_script_come_from_the_run(
    needs: SlurmNeeds,
    typed: tuple[str, ...],
    limit: float | None,
    expected: dict[str, str | None],
    slurm_commands: Path,
) -> None:
    """Oracle: the ``#SBATCH`` lines that submitit writes for the same options."""
    launcher = read_launcher((ON_SLURM, *typed))
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
