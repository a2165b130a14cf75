"""Training over two machines, which are namespaces of this one: each with its own name, address and network card.

Where the system allows no new networks, all of this is skipped with the reason.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.train.heartbeat import read_heartbeats
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from scripts.chaos import count_wrong, read_resumes, read_steps
from scripts.ranks import run_ranks
from tests.cluster.hosts import CARD, Host, connected_hosts, missing_requirement

ROOT = Path(__file__).parents[2]
RANKS, STEPS, EVERY = 2, 44, 10
"""Ranks on a host; steps of a run; steps between checkpoints."""
PORT = 29400
DEADLINE_SECONDS = 120.0

WORDS = [
    *("experiment=null", "model=llama_debug", "train.batch_size=1", "train.seq_len=32", f"train.steps={STEPS}"),
    *("parallel=fsdp2", "mesh.fsdp_size=node", "train.deterministic=true", "launch.device=cpu"),
    *(f"checkpoint.every={EVERY}", "checkpoint.final_weights=true", "metrics.console=none"),
]

pytestmark = [pytest.mark.launcher, pytest.mark.usefixtures("unmeasured", "warm")]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Two hosts."""
    reason = missing_requirement()
    if reason is not None:
        pytest.skip(reason)
    with connected_hosts(2, tmp_path_factory.mktemp("hosts")) as found:
        yield found


def run_here(config: Config) -> None:
    Run(Trainer(config)).run()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one host, with the same sharding as on two."""
    folder = tmp_path_factory.mktemp("one") / "run"
    config = compose_config([*WORDS, f"metrics.run_dir={folder}"])
    config.validate(2 * RANKS, "cpu", RANKS)
    run_ranks(2 * RANKS, run_here, config)
    return folder


class OnHosts:
    """The same command on every host.

    Args:
        hosts: where it runs.
        command: after ``python -m``.
        folder: for its output.
        environment: added to this process's.
    """

    def __init__(self, hosts: Sequence[Host], command: Sequence[str], folder: Path, **environment: str) -> None:
        self._outputs = [folder / f"{host.name}.txt" for host in hosts]
        left_out = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        present = {key: value for key, value in os.environ.items() if key not in left_out}
        present |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
        self._processes: list[Any] = []
        for host, output in zip(hosts, self._outputs, strict=True):
            with output.open("w") as file:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", *command],
                        env=present,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        preexec_fn=host.enter,
                    )
                )

    def __enter__(self) -> "OnHosts":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def output(self, host: int) -> str:
        """A host's output so far."""
        return self._outputs[host].read_text()

    def final_output(self) -> str:
        """The output of all hosts once they have ended, or half a minute later."""
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        return self.output(0) + self.output(1)

    def until(self, there: Any) -> None:
        """Wait for a condition while all hosts run."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not there():
            assert time.monotonic() < deadline and all(each.poll() is None for each in self._processes), self.output(
                0
            ) + self.output(1)
            time.sleep(0.01)

    def statuses(self) -> list[int]:
        """Wait for the end on all hosts."""
        return [process.wait(DEADLINE_SECONDS) for process in self._processes]


def steps_done(folder: Path) -> int:
    steps = read_steps(folder)
    return steps[-1]["step"] if steps else 0


def start_until_saved(hosts: Sequence[Host], place: Path, port: int, words: Sequence[str] = ()) -> tuple[OnHosts, Path]:
    """Start a run that can be cut off, and wait until it is past its first checkpoint.

    Hosts that lose each other before they are cut off, as seen on machines under load, get another start; where they do
    so again there is nothing to cut, and the rest is skipped.

    Returns:
        The run, which its caller has to leave, and its directory.
    """
    for attempt in range(2):
        here = place / str(attempt)
        here.mkdir()
        command = ["fsdptoys", "train", *WORDS, f"metrics.run_dir={here / 'run'}", f"launch.nproc_per_node={RANKS}"]
        command += ["launch.nnodes=2", f"launch.rdzv_endpoint=node0:{port + attempt}", "launch.timeout_seconds=8"]
        runs = OnHosts(hosts, [*command, *words], here)
        try:
            runs.until(lambda: steps_done(here / "run") > EVERY)  # noqa: B023
            return runs, here / "run"
        except BaseException as ended:
            # The host that gave up first may print its reason after the other has ended.
            timed_out = isinstance(ended, AssertionError) and "a collective timed out" in runs.final_output()
            runs.__exit__()
            if not timed_out:
                raise
    pytest.skip("the hosts of this machine lost each other by themselves, twice")


def test_two_hosts_under_torchrun_match_one_host_bitwise(hosts: list[Host], whole: Path, tmp_path: Path) -> None:
    """Oracle: the same ranks on one host; steps and final weights bitwise. Each host's ranks share a copy of the
    parameters, and have the host's name."""
    folder = tmp_path / "run"
    command = ["torch.distributed.run", "--nnodes=2", f"--nproc-per-node={RANKS}", "--rdzv-backend=c10d"]
    command += [f"--rdzv-endpoint={hosts[0].address}:{PORT}", "-m", "fsdptoys", "train", *WORDS]
    seen: set[tuple[int, str]] = set()

    def all_ranks_seen() -> bool:
        seen.update((sign.rank, sign.host) for sign in read_heartbeats(folder / "heartbeats").values())
        return len(seen) == 2 * RANKS

    with OnHosts(hosts, [*command, f"metrics.run_dir={folder}"], tmp_path, GLOO_SOCKET_IFNAME=CARD) as runs:
        runs.until(all_ranks_seen)
        assert runs.statuses() == [0, 0], runs.output(0) + runs.output(1)
    assert {host for _, host in seen} == {"node0", "node1"}
    assert f"fsdp_size: {RANKS}\n" in (folder / "config.yaml").read_text()
    assert count_wrong(whole, folder, STEPS) == 0


def test_run_survives_a_temporary_network_loss_of_a_host(hosts: list[Host], whole: Path, tmp_path: Path) -> None:
    """Oracle: the undisturbed run, bitwise. The second host's packets vanish in the middle of a step, until the
    ranks of both have given up a collective of that step after launch.timeout_seconds, and then come again."""
    started, folder = start_until_saved(hosts, tmp_path, PORT + 4, ["launch.max_restarts=2"])
    with started as runs:
        cut_after = steps_done(folder)
        hosts[1].cut_off()
        try:
            runs.until(lambda: all("restarting (1 of 2)" in runs.output(host) for host in range(2)))
        finally:
            hosts[1].join()
        assert runs.statuses() == [0, 0], runs.output(0) + runs.output(1)
        assert "a collective timed out (launch.timeout_seconds=8)" in runs.output(0) + runs.output(1)
    resumed = [line["step"] for line in read_resumes(folder)]
    assert resumed == [EVERY] and EVERY < cut_after < 2 * EVERY
    assert count_wrong(whole, folder, STEPS) == 0


def test_permanent_network_loss_ends_the_run_with_the_reason(hosts: list[Host], tmp_path: Path) -> None:
    """Oracle: without restarts both end with status 1 and the reason, also the one that cannot reach the other."""
    started, _ = start_until_saved(hosts, tmp_path, PORT + 2)
    with started as runs:
        hosts[1].cut_off()
        try:
            assert runs.statuses() == [1, 1]
        finally:
            hosts[1].join()
        messages = [runs.output(host) for host in range(2)]
    assert any("a collective timed out (launch.timeout_seconds=8)" in each for each in messages)
    assert all(
        re.search(r"^fsdptoys: rank \d failed:", each, re.M) or "another machine ended" in each for each in messages
    )
