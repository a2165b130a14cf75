"""The ports on which a run listens, and the powers of a stranger who connects to them."""

import os
import re
import resource
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdptoys.errors import ConfigError
from fsdptoys.launch.launch_folder import PREFIX, LaunchFolder
from fsdptoys.train import launch_env
from tests.harness.launched_training import training, wait_while_running
from tests.harness.launchers import free_port
from tests.harness.levels import extended
from tests.harness.processes import wait_until
from tests.launch.stranger import attack, listening_sockets

WORDS = [
    *(
        "fsdptoys",
        "train",
        "experiment=null",
        "model=llama_debug",
        "parallel=fsdp2",
        "launch.device=cpu",
    ),
    *(
        "train.batch_size=1",
        "train.seq_len=32",
        "train.steps=60",
        "metrics.console=none",
    ),
    "launch.timeout_seconds=120",
]
TWO_NODES = [*WORDS, "launch.nnodes=2", "launch.nproc_per_node=1"]
TOKEN = b"0123456789abcdef"
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
"""127.0.0.1 and ::1, as /proc/net has them."""

on_linux = pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="sockets are listed by Linux alone"
)


def token_file(folder: Path, token: bytes) -> str:
    """Return the override of a new file with this token."""
    path = folder / token.decode()
    path.touch(0o600)
    path.write_bytes(token)
    return f"launch.rdzv_token_file='{path}'"


@on_linux
@pytest.mark.usefixtures("unmeasured", "warm")
def test_single_node_run_listens_on_loopback_only_and_unpickles_nothing(
    tmp_path: Path,
) -> None:
    """Oracle: the kernel's list of all sockets of the run's processes from their start to their
    end; a file that each pickle would make, put into every store behind them."""
    pwned = tmp_path / "pwned"
    folder = tmp_path / "run"
    sockets: set[tuple[str, int]] = set()
    attacked: set[int] = set()
    argv = [
        *WORDS,
        "launch.nproc_per_node=2",
        "checkpoint.every=20",
        f"metrics.run_dir={folder}",
    ]
    with training(argv, tmp_path / "output") as run:
        while not run.ended():
            sockets |= listening_sockets(run.process.pid)
            if (folder / "metrics.jsonl").exists():
                for port in {port for _, port in sockets} - attacked:
                    attacked.add(port)
                    attack("127.0.0.1", port, str(pwned))
            time.sleep(0.02)
        assert run.process.returncode == 0, run.output
    assert sockets and {address for address, _ in sockets} <= LOOPBACK
    assert not pwned.exists()


@on_linux
@pytest.mark.usefixtures("unmeasured", "warm")
@pytest.mark.parametrize(
    "token", [extended(None), TOKEN], ids=["without token", "with token"]
)
def test_multi_node_store_unpickles_nothing_and_listens_on_its_address_only(
    token: bytes | None, tmp_path: Path
) -> None:
    """Oracle: a file that the pickles would make, in every key of the store at the endpoint;
    both launchers, on one machine here, end in the ways of a run, and without a traceback of
    their own."""
    pwned = tmp_path / "pwned"
    folder = tmp_path / "run"
    port = free_port()
    argv = [
        *TWO_NODES,
        f"launch.rdzv_endpoint=127.0.0.1:{port}",
        f"metrics.run_dir={folder}",
    ]
    if token is not None:
        argv.append(token_file(tmp_path, token))
    with (
        training(argv, tmp_path / "output0") as first,
        training(argv, tmp_path / "output1") as second,
    ):
        metrics = folder / "metrics.jsonl"
        wait_while_running(
            [first],
            lambda: metrics.exists() and metrics.read_text().count("\n") > 1,
            "two steps",
        )
        listening = listening_sockets(first.process.pid) | listening_sockets(
            second.process.pid
        )
        assert {
            address for address, listening_port in listening if listening_port == port
        } == {"0100007F"}
        assert attack("127.0.0.1", port, str(pwned)) > 0
        results = [run.result() for run in (first, second)]
    assert not pwned.exists()
    assert all(status in (0, 1, 2) for status, _ in results), results
    assert all("Traceback" not in output for _, output in results), results
    assert all(
        ("any machine of this network can join" in output) == (token is None)
        for _, output in results
    )
    files = [
        path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()
    ]
    contents = "".join([output for _, output in results] + files)
    assert TOKEN.decode() not in contents.replace(str(tmp_path / TOKEN.decode()), "")


@pytest.mark.usefixtures("unmeasured", "warm")
def test_launcher_with_a_different_token_exits_with_one_sentence(
    tmp_path: Path,
) -> None:
    """Oracle: its output; the first machine keeps waiting for the right one."""
    endpoint = f"127.0.0.1:{free_port()}"
    argv = [*TWO_NODES, f"launch.rdzv_endpoint={endpoint}"]
    with (
        training([*argv, token_file(tmp_path, TOKEN)], tmp_path / "output0") as first,
        training(
            [*argv, token_file(tmp_path, b"another token...")], tmp_path / "output1"
        ) as second,
    ):
        pids = [first.process.pid, second.process.pid]
        wait_until(lambda: first.ended() or second.ended(), "the refusal of one", pids)
        status, output = (first if first.ended() else second).result()
    line, *message = output.splitlines()
    assert status == 2 and line.startswith("fsdptoys: found ")
    assert message == [
        f"fsdptoys: another machine at launch.rdzv_endpoint={endpoint} has another token than "
        "this one; give launch.rdzv_token_file the same content on each machine"
    ]


def test_missing_network_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the expected message, with the interfaces of this machine; an existing one is
    none."""
    present = [name for _, name in socket.if_nameindex()]
    monkeypatch.setenv(launch_env.GLOO_INTERFACE, present[0])
    launch_env.check_interface()
    monkeypatch.setenv(launch_env.GLOO_INTERFACE, "nope0")
    message = (
        "GLOO_SOCKET_IFNAME=nope0 names no network interface of this machine; set it to one of "
        f"{', '.join(present)}"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        launch_env.check_interface()


LAUNCH = """
from fsdptoys.config.launch_config import LaunchConfig
from fsdptoys.errors import ConfigError
from fsdptoys.launch.supervisor import run_workers

try:
    run_workers("json.tool", [], 2, LaunchConfig(), {})
except ConfigError as error:
    print(error)
"""


@pytest.mark.usefixtures("warm")
def test_low_open_file_limit_is_refused(tmp_path: Path) -> None:
    """Oracle: the full output, of a launcher under this limit."""
    (tmp_path / "launches.py").write_text(LAUNCH)
    process = subprocess.run(
        [sys.executable, "-m", "launches"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24)),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    message = (
        "ulimit -n is 24, which is too few open files for a run; set it higher, as with: "
        "ulimit -n 1024\n"
    )
    assert (process.stdout, process.stderr) == (message, "")


def test_invalid_log_level_is_refused() -> None:
    """Oracle: the full stderr; the import of torch itself would end with a traceback."""
    command = [sys.executable, "-m", "fsdptoys", "train"]
    process = subprocess.run(
        command, env={**os.environ, "LOGLEVEL": "NOPE"}, capture_output=True, text=True
    )
    message = (
        "PyTorch refuses a variable of the environment (Unknown level: 'NOPE'); unset "
        "TORCH_DISTRIBUTED_DEBUG, TORCH_LOGS or LOGLEVEL"
    )
    assert (process.returncode, process.stderr) == (2, f"fsdptoys: {message}\n")


def test_only_folders_of_killed_launchers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a folder without a lock goes; a living launcher's, a link, a file and other folders
    stay."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living = LaunchFolder()
    stale = tmp_path / f"{PREFIX}stale"
    elsewhere = tmp_path / "elsewhere"
    for folder in (stale, elsewhere, tmp_path / "fsdptoys-other"):
        folder.mkdir()
        (folder / "request").write_text("x")
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    (tmp_path / f"{PREFIX}file").write_text("x")
    launch_folder = LaunchFolder()
    assert stat.S_IMODE(launch_folder.path.stat().st_mode) == 0o700
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {
        living.path.name,
        launch_folder.path.name,
        "elsewhere",
        "fsdptoys-other",
        f"{PREFIX}link",
        f"{PREFIX}file",
    }
    assert (elsewhere / "request").exists()
    living.remove()
    launch_folder.remove()
    assert not living.path.exists() and not launch_folder.path.exists()


def test_user_defined_network_interfaces_are_kept() -> None:
    """Oracle: no value for a variable already set."""
    chosen = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    assert launch_env.loopback_environment(chosen) == {}
    assert set(launch_env.loopback_environment({})) in (set(), set(chosen))
