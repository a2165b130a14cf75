"""Kill real runs at bad moments, restart them, and compare the results with undisturbed runs.

    python scripts/chaos.py --kills 60

Each campaign is one configuration on 2 or 4 ranks (gloo, a tiny model, a checkpoint every other
step, few are kept). First it runs undisturbed. Then the same command runs in another directory and
is killed with SIGKILL: one random rank, or all ranks and the launcher, at a chosen moment: in a
step, during a checkpoint (synchronous or asynchronous, as configured), or during the deletion of an
old one. It is restarted with ``checkpoint.resume=auto`` (or restarts by itself, if
``launch.max_restarts`` is set and the launcher lives) until its share of the kills is done, and
then runs to its end.

Counted are
- lost checkpoints: a run resumes from an older step than the newest complete checkpoint at the
  kill;
- wrong resumes: steps between two starts that differ in a bit of loss, norm or learning rate from
  the undisturbed run, or that are missing or duplicate; or final weights that differ in any bit;
- seconds from a kill to the next new step, interpreter and imports included.

The last lines are a table of the kills and the three numbers; the exit status is 1 if anything was
lost or wrong.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from scripts.common.child_environment import child_environment
from scripts.common.progress import doing, progress, unit

EVERY = 2
"""Steps between two checkpoints."""
STEPS_A_KILL = 6
"""Steps of a run for each kill that it is to survive: kills come after one to this many new
steps."""
KEPT = ("loss", "grad_norm", "learning_rate", "valid_tokens", "skipped")
"""Numbers of a step that must be the same in every bit."""
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

MOMENTS = ("step", "save", "background save", "prune")


@dataclass
class Tally:
    """Counts of one call."""

    kills: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(moment, who) → kills."""
    lost: int = 0
    wrong: int = 0
    resumes: int = 0
    seconds: list[float] = field(default_factory=list)
    """From each kill to the next new step."""


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


def hash_weights(folder: Path) -> str:
    """SHA-256 of the final weights' files."""
    digest = hashlib.sha256()
    paths = sorted((folder / "weights").glob("*.safetensors"))
    assert paths, f"{folder} holds no weights"
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def alive(pid: int) -> bool:
    """Whether a process runs, rather than being gone or waiting for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[
            0
        ] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_once(
    attempt: Attempt,
    next_moment: str,
    after: int,
    everybody: bool,
    chance: random.Random,
) -> str | None:
    """Wait for a moment and kill; returns the moment, or None if the run had ended before.

    Args:
        attempt: a running attempt.
        next_moment: the moment to wait for.
        after: step that must have been taken.
        everybody: kill the launcher and all ranks, rather than one rank.
        chance: decides on the rank and the delay.
    """
    deadline = time.monotonic() + DEADLINE_SECONDS
    while attempt.last_step() < after or len(attempt.rank_pids()) == 0:
        if attempt.ended:
            return None
        assert time.monotonic() < deadline, f"no step {after} in {attempt.folder}"
        time.sleep(0.002)
    if next_moment == "step":
        time.sleep(chance.random() * 0.05)
    until = (
        time.monotonic() + 3.0
    )  # a moment that does not come is not waited for longer
    while (
        attempt.moment() != next_moment
        and time.monotonic() < until
        and not attempt.ended
    ):
        pass
    if next_moment != "step":
        time.sleep(chance.random() * 0.003)
    moment = attempt.moment()
    pids = [pid for pid in attempt.rank_pids() if alive(pid)]
    if attempt.ended or not pids:
        return None
    if everybody:
        os.kill(attempt.process.pid, signal.SIGKILL)
    for pid in pids if everybody else [chance.choice(pids)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return moment


def disturb(
    campaign: Campaign,
    folder: Path,
    steps: int,
    kills: int,
    chance: random.Random,
    tally: Tally,
) -> None:
    """Run a campaign to its end, killing on the way."""
    log = folder.with_suffix(".log")
    attempt = Attempt(campaign, folder, steps, log, resume=True)
    for number in range(kills):
        doing(f"{campaign.name}, kill {number + 1} of {kills}")
        next_moment = campaign.moments[number % 3]
        everybody = chance.random() < 0.5
        before = attempt.last_step()
        moment = kill_once(
            attempt,
            next_moment,
            before + chance.randint(1, STEPS_A_KILL - 3),
            everybody,
            chance,
        )
        if moment is None:
            break
        killed = time.monotonic()
        tally.kills[moment, "all" if everybody else "one rank"] += 1
        if everybody or not campaign.restarts:
            attempt.wait()
            for pid in attempt.rank_pids():  # ranks whose launcher is gone go too
                while alive(pid):
                    time.sleep(0.01)
        whole = attempt.whole()
        last_step = attempt.last_step()
        starts = len(read_resumes(folder))
        if everybody or not campaign.restarts:
            attempt = Attempt(campaign, folder, steps, log, resume=True)
        while len(read_resumes(folder)) <= starts:
            assert time.monotonic() - killed < DEADLINE_SECONDS, (
                f"{folder} did not start again, see {log}"
            )
            time.sleep(0.01)
        resumed = read_resumes(folder)[starts]["step"]
        tally.resumes += 1
        tally.lost += resumed < whole
        while attempt.last_step() <= resumed and not attempt.ended:
            assert time.monotonic() - killed < DEADLINE_SECONDS, (
                f"{folder} took no step, see {log}"
            )
            time.sleep(0.005)
        tally.seconds.append(time.monotonic() - killed)
        with unit(f"{campaign.name}, kill {number + 1}") as progress_unit:
            progress_unit.note = f"went on after {tally.seconds[-1]:.1f} s"
        print(
            f"  kill {tally.resumes}: {'all' if everybody else 'one rank'} during {moment} "
            f"(wanted {next_moment}), step {last_step} done, newest whole {whole}, went on from "
            f"{resumed}, {tally.seconds[-1]:.1f} s",
            flush=True,
        )
    with unit(f"{campaign.name}, the rest of the run"):
        status = attempt.wait()
    assert status == 0, f"{folder} ended with status {status}, see {log}"


def count_wrong(reference: Path, disturbed: Path, steps: int) -> int:
    """Number of stretches between two starts, and final weights, that differ from the undisturbed
    run."""
    expected = {
        line["step"]: [line[name] for name in KEPT]
        for line in read_lines(reference / "metrics.jsonl")
    }
    values: dict[int, list[list]] = {}
    for line in read_lines(disturbed / "metrics.jsonl"):
        values.setdefault(line["step"], []).append([line[name] for name in KEPT])
    assert sorted(expected) == list(range(1, steps + 1)), reference
    starts = sorted({0, *(line["step"] for line in read_resumes(disturbed))})
    ends = [*starts[1:], steps]
    stretches = sum(
        any(values.get(step) != [expected[step]] for step in range(start + 1, end + 1))
        for start, end in zip(starts, ends, strict=True)
    )
    return stretches + (hash_weights(reference) != hash_weights(disturbed))


def main() -> int:
    """Run the campaigns and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60, help="over all campaigns")
    parser.add_argument("--seed", type=int, default=0, help="of moments and victims")
    parser.add_argument("--folder", type=Path, help="keep the runs there")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    tally = Tally()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    campaigns = CAMPAIGNS[: max(1, min(len(CAMPAIGNS), options.kills // 5))]
    started = time.monotonic()
    with progress(options.kills + 2 * len(campaigns)):
        for index, campaign in enumerate(campaigns):
            kills = options.kills // len(campaigns) + (
                index < options.kills % len(campaigns)
            )
            steps = STEPS_A_KILL * kills + 10
            print(f"{campaign.name}: {kills} kills in {steps} steps", flush=True)
            reference = folder / f"{index}-undisturbed"
            disturbed = folder / f"{index}-killed"
            with unit(f"{campaign.name}, undisturbed"):
                undisturbed = Attempt(
                    campaign,
                    reference,
                    steps,
                    reference.with_suffix(".log"),
                    resume=False,
                )
                assert undisturbed.wait() == 0, f"see {reference.with_suffix('.log')}"
            disturb(campaign, disturbed, steps, kills, chance, tally)
            wrong = count_wrong(reference, disturbed, steps)
            tally.wrong += wrong
            outcome = (
                f"{wrong} WRONG, kept in {folder}"
                if wrong
                else "every bit as undisturbed"
            )
            print(f"  {outcome}", flush=True)
    print("\n| killed during | one rank | all |\n|---|---:|---:|")
    for moment in MOMENTS:
        print(
            f"| {moment} | {tally.kills[moment, 'one rank']} | {tally.kills[moment, 'all']} |"
        )
    total = sum(tally.kills.values())
    print(
        f"\nkills {total}; resumes {tally.resumes}; lost checkpoints {tally.lost}; wrong resumes "
        f"{tally.wrong}"
    )
    if tally.seconds:
        print(
            f"median seconds from kill to next step {statistics.median(tally.seconds):.1f}"
        )
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"{time.monotonic() - started:.0f} s in all"
    )
    missed = total < options.kills
    if missed:
        print(
            f"only {total} of {options.kills} kills happened: runs came to their end before"
        )
    good = not (tally.lost or tally.wrong or missed)
    if good and options.folder is None:
        shutil.rmtree(folder)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
