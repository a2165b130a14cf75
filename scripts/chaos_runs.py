"""Runs that are killed from outside: their configurations, and what is seen of a started one."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from scripts.common.child_environment import child_environment

EVERY = 2
"""Steps between two checkpoints."""
DEADLINE_SECONDS = 180.0
"""A run that shows no new step for so long has hung."""


@dataclass(frozen=True)
class Campaign:
    """A configuration, and how it comes back."""

    ranks: int
    overrides: tuple[str, ...]
    restarts: bool = False
    """Whether the launcher starts lost ranks again."""

    @property
    def moments(self) -> tuple[str, ...]:
        """The moments at which it is killed."""
        return (
            "step",
            "background save"
            if "checkpoint.async_save=true" in self.overrides
            else "save",
            "prune",
        )

    @property
    def name(self) -> str:
        """A name that is unique among the campaigns."""
        return f"{self.ranks} ranks, {' '.join(self.overrides)}" + (
            ", launcher restarts" if self.restarts else ""
        )


CAMPAIGNS = (
    Campaign(2, ("parallel=fsdp2",), restarts=True),
    Campaign(2, ("parallel=fsdp2", "checkpoint.async_save=true", "data.workers=1")),
    Campaign(4, ("parallel=fsdp1", "mesh.fsdp_size=2", "checkpoint.async_save=true")),
    Campaign(2, ("parallel=fsdp1", "train.grad_accum=2"), restarts=True),
    Campaign(2, ("parallel=ddp", "checkpoint.async_save=true"), restarts=True),
    Campaign(
        4, ("parallel=fsdp2", "mesh.fsdp_size=2", "memory.optimizer_offload=true")
    ),
)
"""The first ones are taken where there are fewer kills than would go round."""


def overrides_of(campaign: Campaign, folder: Path, steps: int) -> list[str]:
    """The overrides of a campaign's runs."""
    restarts = "launch.max_restarts=1000" if campaign.restarts else ""
    line = (
        f"model=llama_debug train.batch_size=1 train.seq_len=64 train.steps={steps} "
        f"checkpoint.every={EVERY} checkpoint.keep=2 checkpoint.final_weights=true "
        "metrics.console=none experiment=null launch.timeout_seconds=60 launch.device=cpu "
        f"launch.nproc_per_node={campaign.ranks} {restarts}"
    )
    return [*campaign.overrides, *line.split(), f"metrics.run_dir={folder}"]


class Attempt:
    """A started run, observed from outside.

    Args:
        campaign: which run.
        folder: its run directory.
        steps: optimizer steps.
        log: where its output goes.
        resume: whether it may go on.
    """

    def __init__(
        self, campaign: Campaign, folder: Path, steps: int, log: Path, resume: bool
    ) -> None:
        self.folder = folder
        self._save = campaign.moments[1]
        overrides = overrides_of(campaign, folder, steps)
        overrides += ["checkpoint.resume=auto"] if resume else []
        self._log = open(log, "ab")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fsdptoys", "train", *overrides],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=child_environment(OMP_NUM_THREADS="1"),
            start_new_session=True,
        )

    @property
    def ended(self) -> bool:
        """Whether the launcher is gone."""
        return self.process.poll() is not None

    def last_step(self) -> int:
        """The last step in ``metrics.jsonl``; 0 for none."""
        steps = read_lines(self.folder / "metrics.jsonl")
        return steps[-1]["step"] if steps else 0

    def rank_pids(self) -> list[int]:
        """Processes of the ranks, as their heartbeats say."""
        pids = []
        for path in sorted((self.folder / "heartbeats").glob("rank-*.json")):
            try:
                pids.append(int(json.loads(path.read_text().strip("\0 \n"))["pid"]))
            except (ValueError, KeyError):
                continue
        return pids

    def moment(self) -> str:
        """The run's current activity, from the names in the checkpoint folder."""
        try:
            names = os.listdir(self.folder / "checkpoints")
        except FileNotFoundError:
            return "step"
        if any(name.endswith(".deleted") for name in names):
            return "prune"
        return (
            self._save if any(name.endswith(".partial") for name in names) else "step"
        )

    def whole(self) -> int:
        """Step of the newest checkpoint that has its final name; 0 for none."""
        folder = self.folder / "checkpoints"
        names = os.listdir(folder) if folder.exists() else []
        return max(
            (
                int(name[5:])
                for name in names
                if name.startswith("step-") and name[5:].isdigit()
            ),
            default=0,
        )

    def wait(self) -> int:
        """Wait for the end; the exit status."""
        status = self.process.wait(DEADLINE_SECONDS)
        self._log.close()
        return status


def read_lines(path: Path) -> list[dict]:
    """Every whole line of a file of JSON lines; none where it is not there yet."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def read_resumes(folder: Path) -> list[dict]:
    """How the run went on."""
    return read_lines(folder / "resumes.jsonl")


def alive(pid: int) -> bool:
    """Whether a process runs, rather than being gone or waiting for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[
            0
        ] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
