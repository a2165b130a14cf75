"""Training over two machines made of Linux namespaces: each has its own name, address and network
card, on one switch.

A host is a network namespace; its card ends in a bridge in another namespace, so that the network
of the machine that this runs on is not touched. Processes enter a host after the fork, with its
name (UTS namespace) and its /etc/hosts (mount namespace). Hosts share memory, cores, process
numbers and disks, which is a shared file system of the best kind; different clocks and late packets
are not simulated.

Needs root; where the system allows no new networks, all of this is skipped with the reason.
"""

import contextlib
import ctypes
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.train.heartbeat import read_heartbeats
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from scripts.chaos import count_wrong
from scripts.chaos_runs import read_resumes
from tests.harness.launched_training import Training, training, wait_while_running
from tests.harness.processes import load_factor
from tests.harness.ranks import run_ranks

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWNET = 0x40000000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

CARD = "card0"
"""Each host's network interface."""


@dataclass(frozen=True)
class Host:
    """One machine."""

    name: str
    address: str
    network: str
    """Its network namespace."""
    switch: str
    port: str
    """Where its cable ends, in the namespace of the switch."""
    names: Path
    """Its /etc/hosts."""

    def enter(self) -> None:
        """Move this process, which has one thread, onto the host; for ``preexec_fn``."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.network}") as network:
            _succeed(libc.setns(network.fileno(), CLONE_NEWNET))
        _succeed(libc.unshare(CLONE_NEWUTS | CLONE_NEWNS))
        socket.sethostname(self.name)
        _succeed(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
        _succeed(
            libc.mount(os.fsencode(self.names), b"/etc/hosts", None, MS_BIND, None)
        )

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Drop every packet from and to this host; its network card stays up."""
        _ip(f"-n {self.switch} link set {self.port} nomaster")
        try:
            yield
        finally:
            _ip(f"-n {self.switch} link set {self.port} master bridge")


@contextmanager
def connected_hosts(count: int, folder: Path) -> Iterator[list[Host]]:
    """N hosts on one switch; programs still running on them keep their network until it ends.

    Args:
        count: of hosts, named node0, node1, …
        folder: for their /etc/hosts.
    """
    switch = f"fsdptoys-{os.getpid()}-switch"
    addresses = {f"node{index}": f"10.77.0.{index + 1}" for index in range(count)}
    names = folder / "hosts"
    names.write_text(
        "127.0.0.1 localhost\n"
        + "".join(f"{address} {name}\n" for name, address in addresses.items())
    )
    hosts = [
        Host(
            name,
            address,
            f"fsdptoys-{os.getpid()}-{name}",
            switch,
            f"port{index}",
            names,
        )
        for index, (name, address) in enumerate(addresses.items())
    ]
    with contextlib.ExitStack() as namespaces:
        for name in (switch, *(host.network for host in hosts)):
            namespaces.enter_context(_namespace(name))
        _ip(f"-n {switch} link add bridge type bridge")
        _ip(f"-n {switch} link set bridge up")
        for host in hosts:
            here = f"-n {host.network}"
            _ip(
                f"{here} link add {CARD} type veth peer name {host.port} netns {switch}"
            )
            _ip(f"-n {switch} link set {host.port} master bridge up")
            _ip(f"{here} address add {host.address}/24 dev {CARD}")
            _ip(f"{here} link set {CARD} up")
            _ip(f"{here} link set lo up")
        yield hosts


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    _ip(f"netns add {name}")
    try:
        yield name
    finally:
        _ip(f"netns delete {name}")


def _ip(line: str) -> None:
    subprocess.run(["ip", *line.split()], check=True, capture_output=True)


def _succeed(status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


RANKS = 2
STEPS = 24
EVERY = 10
"""Ranks on a host; steps of a run; steps between checkpoints."""
GATE = 13
"""Every rank waits before this step for the test."""
PORT = 29400

WORDS = [
    *(
        "experiment=null",
        "model=llama_debug",
        "train.batch_size=1",
        "train.seq_len=32",
        f"train.steps={STEPS}",
    ),
    *(
        "parallel=fsdp2",
        "mesh.fsdp_size=node",
        "train.deterministic=true",
        "launch.device=cpu",
    ),
    *(
        f"checkpoint.every={EVERY}",
        "checkpoint.final_weights=true",
        "metrics.console=none",
    ),
]

pytestmark = [
    pytest.mark.extended,
    pytest.mark.limit(900),
    pytest.mark.usefixtures("warm"),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Two hosts."""
    with contextlib.ExitStack() as stack:
        try:
            network = connected_hosts(2, tmp_path_factory.mktemp("hosts"))
            connected = stack.enter_context(network)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(
                f"namespaces need root, ip and a kernel that makes networks ({error})"
            )
        yield connected


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


@pytest.fixture
def open_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make all ranks, which are forks, wait before a step until this is called."""
    gate = tmp_path / "open"
    train_step = Trainer.train_step

    def wait_and_train(trainer: Trainer, step: int) -> None:
        while step == GATE and not gate.exists():
            (tmp_path / f"waits{os.environ['RANK']}").touch()
            time.sleep(0.01)
        train_step(trainer, step)

    monkeypatch.setattr(Trainer, "train_step", wait_and_train)
    return gate.touch


@contextlib.contextmanager
def on_hosts(
    hosts: Sequence[Host], command: Sequence[str], folder: Path, **environment: str
) -> Iterator[list[Training]]:
    """Run the same command on every host, with its output and its run directory in the folder."""
    argv = [*command, *WORDS, f"metrics.run_dir={folder / 'run'}"]
    with contextlib.ExitStack() as stack:
        options = {"env": os.environ | environment}
        yield [
            stack.enter_context(
                training(argv, folder / host.name, preexec_fn=host.enter, **options)
            )
            for host in hosts
        ]


def wait_for_gate(runs: Sequence[Training], folder: Path) -> None:
    """Wait until all ranks wait at the gate."""
    wait_while_running(
        runs,
        lambda: len(list(folder.glob("waits*"))) == 2 * RANKS,
        "all ranks at the gate",
    )


def launcher(port: int, timeout_seconds: float, *overrides: str) -> list[str]:
    """Return the command of a host's launcher."""
    return [
        *("fsdptoys", "train", f"launch.nproc_per_node={RANKS}", "launch.nnodes=2"),
        *(
            f"launch.rdzv_endpoint=node0:{port}",
            f"launch.timeout_seconds={timeout_seconds}",
            *overrides,
        ),
    ]


@pytest.fixture
def timeout_seconds() -> float:
    """Timeout of collectives: the ranks of a loaded machine must not lose each other by
    themselves."""
    return float(round(15 + 15 * load_factor()))


def test_two_hosts_under_torchrun_match_one_host_bitwise(
    hosts: list[Host], whole: Path, open_gate: Callable[[], None], tmp_path: Path
) -> None:
    """Oracle: the same ranks on one host; steps and final weights bitwise. Each host's ranks share
    a copy of the parameters, and have the host's name."""
    command = [
        "torch.distributed.run",
        "--nnodes=2",
        f"--nproc-per-node={RANKS}",
        "--rdzv-backend=c10d",
    ]
    command += [f"--rdzv-endpoint={hosts[0].address}:{PORT}", "-m", "fsdptoys", "train"]
    with on_hosts(hosts, command, tmp_path, GLOO_SOCKET_IFNAME=CARD) as runs:
        wait_for_gate(runs, tmp_path)
        senders = {
            (sign.rank, sign.host)
            for sign in read_heartbeats(tmp_path / "run" / "heartbeats").values()
        }
        open_gate()
        results = [run.result() for run in runs]
    assert [status for status, _ in results] == [0, 0], results
    assert len(senders) == 2 * RANKS and {host for _, host in senders} == {
        "node0",
        "node1",
    }
    assert f"fsdp_size: {RANKS}\n" in (tmp_path / "run" / "config.yaml").read_text()
    assert count_wrong(whole, tmp_path / "run", STEPS) == 0


def test_run_survives_a_temporary_network_loss_of_a_host(
    hosts: list[Host],
    whole: Path,
    open_gate: Callable[[], None],
    timeout_seconds: float,
    tmp_path: Path,
) -> None:
    """Oracle: the undisturbed run, bitwise. The second host's packets vanish before a step, until
    the ranks of both have given up a collective of that step after launch.timeout_seconds, and then
    come again."""
    with on_hosts(
        hosts, launcher(PORT + 1, timeout_seconds, "launch.max_restarts=2"), tmp_path
    ) as runs:
        wait_for_gate(runs, tmp_path)
        with hosts[1].cut_off():
            open_gate()
            wait_while_running(
                runs,
                lambda: all("restarting (1 of 2)" in run.output for run in runs),
                "two restarts",
            )
        results = [run.result() for run in runs]
    assert [status for status, _ in results] == [0, 0], results
    assert any(
        f"timed out (launch.timeout_seconds={timeout_seconds:g})" in output
        for _, output in results
    )
    assert [line["step"] for line in read_resumes(tmp_path / "run")] == [EVERY]
    assert count_wrong(whole, tmp_path / "run", STEPS) == 0


def test_permanent_network_loss_ends_the_run_with_the_reason(
    hosts: list[Host],
    open_gate: Callable[[], None],
    timeout_seconds: float,
    tmp_path: Path,
) -> None:
    """Oracle: without restarts both end with status 1 and the reason, also the one that cannot
    reach the other."""
    with on_hosts(hosts, launcher(PORT + 2, timeout_seconds), tmp_path) as runs:
        wait_for_gate(runs, tmp_path)
        with hosts[1].cut_off():
            open_gate()
            results = [run.result() for run in runs]
    assert [status for status, _ in results] == [1, 1], results
    assert any(
        f"timed out (launch.timeout_seconds={timeout_seconds:g})" in output
        for _, output in results
    )
    for _, output in results:
        assert (
            re.search(r"^fsdptoys: rank \d failed:", output, re.M)
            or "another machine ended" in output
        )
