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
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from scripts.chaos_runs import (
    CAMPAIGNS,
    DEADLINE_SECONDS,
    Attempt,
    Campaign,
    alive,
    read_lines,
    read_resumes,
)
from scripts.common.progress import doing, progress, unit

STEPS_A_KILL = 6
"""Steps of a run for each kill that it is to survive: kills come after one to this many new
steps."""
KEPT = ("loss", "grad_norm", "learning_rate", "valid_tokens", "skipped")
"""Numbers of a step that must be the same in every bit."""


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


def hash_weights(folder: Path) -> str:
    """SHA-256 of the final weights' files."""
    paths = sorted((folder / "weights").glob("*.safetensors"))
    assert paths, f"{folder} holds no weights"
    return hashlib.sha256(b"".join(map(Path.read_bytes, paths))).hexdigest()


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
    # A moment that does not come is not waited for longer
    until = time.monotonic() + 3.0
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
        moment = kill_once(
            attempt,
            next_moment,
            attempt.last_step() + chance.randint(1, STEPS_A_KILL - 3),
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
