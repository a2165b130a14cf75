"""The files of scripts/cluster, read as a scheduler reads them, and the batch script.

SLURM and Kubernetes are not needed. The batch script runs with stand-ins of SLURM's commands on
PATH; the manifest is read by the models that Kubeflow generates from the definitions of its
resources.
"""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from fsdptoys.launch.launch import resolve_run
from tests.harness.processes import wait_until

FILES = Path(__file__).parents[2] / "scripts" / "cluster"
SBATCH = FILES / "train.sbatch"

OPTIONS = {
    "job-name": r"\S+",
    "nodes": r"\d+",
    "ntasks-per-node": r"1",
    "time": r"\d\d:\d\d:\d\d",
    "signal": r"B:USR1@\d+",
    "requeue": None,
    "open-mode": r"append|truncate",
    "output": r"\S+",
}
"""Of sbatch, as its manual has them (https://slurm.schedmd.com/sbatch.html), with their values."""

COMMANDS = {
    "scontrol": 'echo "scontrol $*" >> log; [ "$1" != show ] || printf "node7\\nnode8\\n"',
    "scancel": 'echo "scancel $*" >> log; kill -USR1 "$(cat step)"',
    "srun": 'echo "srun $SRUN_CPUS_PER_TASK" >> log; echo $$ > step; shift; exec "$@"',
    # A run that is requested to stop, or ends.
    "python": 'printf "%s\\n" "$@" > words; trap "exit ${ASKED:-0}" USR1\n'
    '[ -n "$ENDS" ] && exit "$ENDS"\n'
    "echo > runs; while :; do sleep 0.02; done",
}


def test_sbatch_options_are_documented() -> None:
    """Oracle: the manual's options; the shell, which reads the rest. Behind the first command none
    is read."""
    assert subprocess.run(["bash", "-n", SBATCH]).returncode == 0
    head, _, body = SBATCH.read_text().partition("\npython=")
    lines = re.findall(r"^#SBATCH (.*)$", head, re.M)
    assert len(lines) == len(OPTIONS) and "#SBATCH" not in body
    for line in lines:
        name, _, value = line.removeprefix("--").partition("=")
        assert re.fullmatch(OPTIONS[name] or "", value), line


class Job:
    """The batch script, started as SLURM would, except for the commands that it calls."""

    def __init__(self, folder: Path, *argv: str, **environment: str) -> None:
        self.folder = folder
        for name, text in COMMANDS.items():
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/bin/bash\n{text}\n")
            path.chmod(0o755)
        slurm = {
            "JOB_ID": "123456",
            "JOB_NAME": "fsdptoys",
            "JOB_NODELIST": "node[7-8]",
            "NNODES": "2",
        }
        slurm |= {"GPUS_ON_NODE": "4", "CPUS_PER_TASK": "16"}
        present = {
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            **{f"SLURM_{key}": value for key, value in slurm.items()},
        }
        self.process = subprocess.Popen(
            ["bash", SBATCH, *argv],
            cwd=folder,
            env=present | environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def signal(self) -> None:
        """Send the signal for the time limit once the run has started."""
        wait_until((self.folder / "runs").exists, "the run", [self.process.pid])
        self.process.send_signal(signal.SIGUSR1)

    def end(self) -> tuple[int, list[str]]:
        """Exit status, and the recorded calls of SLURM."""
        self.output = self.process.communicate()[0]
        return self.process.returncode, (self.folder / "log").read_text().splitlines()


@pytest.mark.parametrize("status", [0, 1])
def test_every_node_starts_the_run_with_the_first_node_as_rendezvous(
    status: int, tmp_path: Path
) -> None:
    """Oracle: the expected arguments, which the launcher accepts; the port changes after a requeue.
    A run that ends by itself is not requeued, even if it failed."""
    job = Job(
        tmp_path,
        "model=llama_debug",
        "train.steps=3",
        ENDS=str(status),
        SLURM_RESTART_COUNT="2",
    )
    assert job.end() == (status, ["scontrol show hostnames node[7-8]", "srun 16"])
    argv = (tmp_path / "words").read_text().split()
    assert argv == [
        *(
            "-m",
            "fsdptoys",
            "train",
            "launch.nnodes=2",
            "launch.nproc_per_node=4",
            "launch.rdzv_endpoint=node7:25298",
        ),
        *(
            "metrics.run_dir=runs/fsdptoys-123456",
            "checkpoint.resume=auto",
            "metrics.console=plain",
        ),
        *("model=llama_debug", "train.steps=3"),
    ]
    assert resolve_run([*argv[3:], "launch.device=cpu"], {}).world_size == 8


@pytest.mark.parametrize(
    "step_status, requeued",
    [
        (0, True),
        *(
            (128 + number, True)
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL)
        ),
        (1, False),
    ],
)
def test_run_at_its_time_limit_saves_and_is_requeued(
    step_status: int, requeued: bool, tmp_path: Path
) -> None:
    """Oracle: the calls, in order: the step is asked to stop, and the job requeued when it has
    ended well, or before its first step, where one node's end may be another's SIGTERM or
    SIGKILL."""
    job = Job(tmp_path, ASKED=str(step_status))
    job.signal()
    status, log = job.end()
    assert log[2] == "scancel --signal=USR1 123456.0"
    assert (status, log[3:]) == (
        (0, ["scontrol requeue 123456"]) if requeued else (step_status, [])
    )


def test_manifest_is_valid_for_kubeflow_trainer() -> None:
    """Oracle: models generated from the resources' definitions, which drop unknown keys; overrides
    that train."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    runtime, job = yaml.safe_load_all((FILES / "trainjob.yaml").read_text())
    for manifest, kind in (
        (runtime, models.TrainerV1alpha1TrainingRuntime),
        (job, models.TrainerV1alpha1TrainJob),
    ):
        assert manifest[
            "apiVersion"
        ] == "trainer.kubeflow.org/v1alpha1" and kind.__name__.endswith(
            manifest["kind"]
        )
        assert kind.from_dict(manifest).to_dict() == manifest
    reference = job["spec"]["runtimeRef"]
    trainer = job["spec"]["trainer"]
    assert (reference["kind"], reference["name"]) == (
        runtime["kind"],
        runtime["metadata"]["name"],
    )
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert container["command"] == ["torchrun"] and trainer["args"][:3] == [
        "-m",
        "fsdptoys",
        "train",
    ]
    ranks = 8 * trainer["numNodes"]
    torchrun = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": f"{ranks}",
        "LOCAL_WORLD_SIZE": "8",
    }
    config = resolve_run(
        [*trainer["args"][3:], "launch.device=cpu"], torchrun
    ).composition.config
    assert (config.mesh.fsdp_size, config.metrics.run_dir) == (8, "/runs/llama3-8b")
    assert config.metrics.run_dir.startswith(container["volumeMounts"][0]["mountPath"])


def test_documented_torchx_command_builds_a_job() -> None:
    """Oracle: TorchX's own request to SLURM; runs where torchx is installed."""
    pytest.importorskip("torchx")
    from torchx.runner import get_runner  # type: ignore[import-not-found]

    text = (FILES.parents[1] / "docs" / "cluster.md").read_text()
    command = re.search(r"^torchx run (.*?)\n```", text, re.M | re.S)
    assert command is not None
    argv = command[1].replace("\\\n", " ").split()
    component = argv[argv.index("dist.ddp") + 1 :]
    with get_runner() as runner:
        request = str(
            runner.dryrun_component(
                "dist.ddp", component, "slurm", {"partition": "gpu"}
            )
        )
    assert (
        "torchrun" in request
        and "-m fsdptoys train model=llama3_8b mesh.fsdp_size=node" in request
    )
    assert "--nnodes 2 --nproc_per_node 8" in request
