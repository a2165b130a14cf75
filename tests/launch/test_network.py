"""The ports on which a run listens, and the powers of a stranger who connects to them."""

import os
import pickle
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from fsdptoys.errors import ConfigError
from fsdptoys.launch.launch_folder import PREFIX, LaunchFolder
from fsdptoys.launch.rendezvous_server import RendezvousEndpoint
from fsdptoys.launch.rendezvous_state import KEY, ForeignStateError, SignedBackend, read_token
from fsdptoys.train import launch_env
from tests.launch.stranger import Touches, attack, listening_sockets

ROOT = Path(__file__).parents[2]
STEPS = 60
WORDS = [
    *("experiment=null", "model=llama_debug", "train.batch_size=1", "train.seq_len=32", f"train.steps={STEPS}"),
    *("parallel=fsdp2", "launch.device=cpu", "metrics.console=none", "launch.timeout_seconds=20"),
]
TOKEN = b"0123456789abcdef"
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
"""127.0.0.1 and ::1, as /proc/net has them."""

on_linux = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are listed by Linux alone")


@contextmanager
def started(words: Sequence[str], output: Path, **environment: str) -> Iterator[Any]:
    """``fsdptoys train`` as a process, which is killed in the end."""
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", launch_env.GLOO_INTERFACE)
    present = {key: value for key, value in os.environ.items() if key not in left_out}
    present |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "fsdptoys", "train", *words],
            env=present,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for_step(folder: Path, step: int, process: Any, output: Path) -> None:
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or (folder / "metrics.jsonl").read_text().count("\n") < step:
        assert time.monotonic() < deadline and process.poll() is None, output.read_text()
        time.sleep(0.02)


@on_linux
@pytest.mark.launcher
@pytest.mark.usefixtures("unmeasured", "warm")
def test_single_node_run_listens_on_loopback_only_and_unpickles_nothing(tmp_path: Path) -> None:
    """Oracle: the kernel's list of all sockets of the run's processes from their start to their end; a file that each
    pickle would make, put into every store behind them."""
    output, pwned, folder = tmp_path / "output", tmp_path / "pwned", tmp_path / "run"
    found: set[tuple[str, int]] = set()
    words = [*WORDS, "launch.nproc_per_node=2", "checkpoint.every=20", f"metrics.run_dir={folder}"]
    with started(words, output) as process:
        attacked: set[int] = set()
        while process.poll() is None:
            found |= listening_sockets(process.pid)
            if (folder / "metrics.jsonl").exists():
                for _, port in sorted(found):
                    if port not in attacked:
                        attacked.add(port)
                        attack("127.0.0.1", port, str(pwned))
            time.sleep(0.01)
        assert process.wait() == 0, output.read_text()
    assert found and {address for address, _ in found} <= LOOPBACK
    assert not pwned.exists()


@on_linux
@pytest.mark.launcher
@pytest.mark.usefixtures("unmeasured", "warm")
@pytest.mark.parametrize("token", [None, TOKEN], ids=["without token", "with token"])
def test_multi_node_store_unpickles_nothing_and_listens_on_its_address_only(
    token: bytes | None, tmp_path: Path
) -> None:
    """Oracle: a file that the pickles would make, in every key of the store at the endpoint; both launchers, on one
    machine here, end in the ways of a run, and without a traceback of their own."""
    pwned, folder = tmp_path / "pwned", tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [*WORDS, "launch.nnodes=2", "launch.nproc_per_node=1", f"launch.rdzv_endpoint=127.0.0.1:{port}"]
    words.append(f"metrics.run_dir={folder}")
    if token is not None:
        secret = tmp_path / "token"
        secret.write_bytes(token)
        secret.chmod(0o600)
        words.append(f"launch.rdzv_token_file={secret}")
    outputs = [tmp_path / "output0", tmp_path / "output1"]
    with started(words, outputs[0]) as first, started(words, outputs[1]) as second:
        wait_for_step(folder, 2, first, outputs[0])
        listening = listening_sockets(first.pid) | listening_sockets(second.pid)
        assert {address for address, place in listening if place == port} == {"0100007F"}
        assert attack("127.0.0.1", port, str(pwned)) > 0
        statuses = [process.wait(120) for process in (first, second)]
    message = [output.read_text() for output in outputs]
    assert not pwned.exists()
    assert all(status in (0, 1, 2) for status in statuses), message
    assert all("Traceback" not in each for each in message), message
    assert all(("any machine of this network can join" in each) == (token is None) for each in message)
    assert TOKEN.decode() not in "".join(message) + "".join(
        path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()
    )


@pytest.mark.launcher
@pytest.mark.usefixtures("unmeasured", "warm")
def test_launcher_with_a_different_token_exits_with_one_sentence(tmp_path: Path) -> None:
    """Oracle: its output; the first machine keeps waiting for the right one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    words = [*WORDS, "launch.nnodes=2", "launch.nproc_per_node=1", f"launch.rdzv_endpoint={endpoint}"]
    secrets = [tmp_path / "one", tmp_path / "other"]
    for secret, token in zip(secrets, (TOKEN, b"another token..."), strict=True):
        secret.touch(0o600)
        secret.write_bytes(token)
    outputs = [tmp_path / "output0", tmp_path / "output1"]
    with (
        started([*words, f"launch.rdzv_token_file={secrets[0]}"], outputs[0]) as first,
        started([*words, f"launch.rdzv_token_file={secrets[1]}"], outputs[1]) as second,
    ):
        deadline = time.monotonic() + 90
        while first.poll() is None and second.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        refused = 0 if first.poll() is not None else 1
        assert (first, second)[refused].wait() == 2
    found, *message = outputs[refused].read_text().splitlines()
    assert found.startswith("fsdptoys: found ") and message == [
        f"fsdptoys: another machine at launch.rdzv_endpoint={endpoint} has another token than this one; give "
        "launch.rdzv_token_file the same content on each machine"
    ]


def state() -> Any:
    made = _RendezvousState()
    node, other = _NodeDesc("node0", 1, 0), _NodeDesc("node1", 2, 0)
    made.round, made.complete = 3, True
    made.participants, made.wait_list = {node: 0}, {other}
    made.last_heartbeats = {node: datetime.fromtimestamp(1.5e9 + 0.25, timezone.utc)}
    return made


def backend(store: Any, token: bytes | None = None) -> SignedBackend:
    return SignedBackend(store, "fsdptoys", token, "node0:29400")


@pytest.mark.parametrize("token", [None, TOKEN], ids=["without token", "with token"])
def test_state_round_trips_and_stale_writers_are_fenced(token: bytes | None) -> None:
    """Oracle: the state itself; torch's rule that only a machine that knows the latest state can replace it."""
    store = HashStore()
    one, other = backend(store, token), backend(store, token)
    assert one.get_state() is None
    set_by_one = one.set_state(pickle.dumps(state()))
    assert set_by_one is not None and set_by_one[2]
    seen = other.get_state()
    assert seen is not None and vars(pickle.loads(seen[0])) == vars(state())
    late = other.set_state(pickle.dumps(state()))  # as if there were none
    assert late is not None and not late[2]
    known = other.set_state(pickle.dumps(state()), seen[1])
    assert known is not None and known[2]
    stale = one.set_state(pickle.dumps(state()), set_by_one[1])
    assert stale is not None and not stale[2]


@pytest.mark.parametrize(
    "writes, reads, message",
    [
        (TOKEN, b"another token...", "has another token than this one"),
        (TOKEN, None, "share a token, and this one has none"),
        (None, TOKEN, "has no token, and this one has"),
    ],
)
def test_token_mismatch_is_refused(writes: Any, reads: Any, message: str) -> None:
    """Oracle: the expected message."""
    store = HashStore()
    backend(store, writes).set_state(pickle.dumps(state()))
    with pytest.raises(ForeignStateError, match=message):
        backend(store, reads).get_state()


def overwritten(store: Any, part: str, by: str) -> None:
    text = store.get(KEY).decode()
    assert part in text
    store.set(KEY, text.replace(part, by))


FOREIGN_STATES = ["", "[]", "{}", "[" * 100_000, '{"message": 1, "hmac": null}', '{"message": "[]", "hmac": null}']
CHANGES = [
    *(('1, \\"state', 'null, \\"state'), ('1, \\"state', '-1, \\"state'), ('round\\": 3', 'round\\": 1e999')),
    *(('round\\": 3', 'round\\": true'), ('complete\\": true', 'complete\\": 1'), ("1500000000.25", "1e30")),
    *(("1500000000.25", "NaN"), ('"node1\\"', '"\\\\u001b[2J\\"'), ('"node1\\", 2, 0', '"node1\\", 2')),
    *(('closed\\"', 'close\\"'), ('wait_list\\": [[', 'wait_list\\": [[[], [')),
]


@pytest.mark.parametrize("text", FOREIGN_STATES, ids=lambda text: text[:20])
def test_malformed_state_is_refused(text: str) -> None:
    """Oracle: one kind of error, which names the endpoint."""
    store = HashStore()
    made = backend(store)
    store.set(KEY, text)
    with pytest.raises(ForeignStateError, match=r"launch\.rdzv_endpoint=node0:29400 cannot be trusted"):
        made.get_state()


@pytest.mark.parametrize("part, by", CHANGES)
@pytest.mark.parametrize("token", [None, TOKEN], ids=["without token", "with token"])
def test_modified_state_is_refused(token: bytes | None, part: str, by: str) -> None:
    """Oracle: values of other kinds are found without a token, and every change with one."""
    store = HashStore()
    backend(store, token).set_state(pickle.dumps(state()))
    overwritten(store, part, by)
    with pytest.raises(ForeignStateError):
        backend(store, token).get_state()


def test_older_or_removed_state_is_refused() -> None:
    """Oracle: a machine that has seen the newer one."""
    store = HashStore()
    one = backend(store, TOKEN)
    first = one.set_state(pickle.dumps(state()))
    assert first is not None
    one.set_state(pickle.dumps(state()), first[1])
    store.set(KEY, first[1].decode())
    with pytest.raises(ForeignStateError, match="replaced by an older one"):
        one.get_state()
    store.set(KEY, "nothing")
    with pytest.raises(ForeignStateError, match="its state was removed"):
        one.get_state()


def test_pickle_in_place_of_the_state_is_not_executed(tmp_path: Path) -> None:
    """Oracle: a file that the pickle would make, as it does with torch's backend."""
    store = HashStore()
    made = backend(store)
    store.set(KEY, pickle.dumps(Touches(str(tmp_path / "pwned"))).decode("latin-1"))
    with pytest.raises(ForeignStateError):
        made.get_state()
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "content, mode, message",
    [
        (None, 0o600, "cannot be read (No such file or directory)"),
        (TOKEN, 0o640, "has mode 0640, with which others may read the token; set it to 0600"),
        (b"short\n", 0o600, "holds 5 bytes and must hold 16 to 4096"),
        (b"x" * 5000, 0o600, "and must hold 16 to 4096"),
    ],
)
def test_invalid_token_file_is_refused(content: bytes | None, mode: int, message: str, tmp_path: Path) -> None:
    """Oracle: the expected message."""
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_token(str(path))


def test_token_is_the_file_content_without_whitespace(tmp_path: Path) -> None:
    """Oracle: the content."""
    path = tmp_path / "token"
    path.write_bytes(TOKEN + b"\n")
    path.chmod(0o400)
    assert (read_token(str(path)), read_token(None)) == (TOKEN, None)


def test_unresolvable_endpoint_is_refused() -> None:
    """Oracle: the system's own word for it."""
    with pytest.raises(RendezvousConnectionError, match=r"no\.such\.host\.invalid has no address"):
        RendezvousEndpoint("no.such.host.invalid:29500")


@on_linux
def test_loopback_host_name_listens_on_all_interfaces(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the kernel's list; Debian gives a machine's own name to 127.0.1.1, where no other machine comes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    resolve = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda _, *rest, **more: resolve("127.0.1.1", *rest, **more))
    point = RendezvousEndpoint(f"own:{port}")
    listening = point._listen(*point._addresses[0])
    assert listening is not None
    with listening:
        assert ("00000000", port) in listening_sockets(os.getpid())
    assert capsys.readouterr().err.startswith(
        "fsdptoys: own is 127.0.1.1 on this machine, so launch.rdzv_endpoint=own:"
    )


def test_missing_network_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the expected message, with the interfaces of this machine; an existing one is none."""
    present = [name for _, name in socket.if_nameindex()]
    monkeypatch.setenv(launch_env.GLOO_INTERFACE, present[0])
    launch_env.check_interface()
    monkeypatch.setenv(launch_env.GLOO_INTERFACE, "nope0")
    message = (
        f"GLOO_SOCKET_IFNAME=nope0 names no network interface of this machine; set it to one of {', '.join(present)}"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        launch_env.check_interface()


def test_user_defined_network_interfaces_are_kept() -> None:
    """Oracle: no value for a variable already set."""
    chosen = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    assert launch_env.loopback_environment(chosen) == {}
    assert set(launch_env.loopback_environment({})) in (set(), set(chosen))


def set_limit(files: int) -> Any:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))


@pytest.mark.parametrize("files", [16, 24])
def test_low_open_file_limit_is_refused(files: int) -> None:
    """Oracle: the full stderr, of a launcher under this limit."""
    code = "from fsdptoys.launch.supervisor import run_workers\nfrom fsdptoys.errors import ConfigError\n"
    code += "from fsdptoys.config.launch_config import LaunchConfig\n"
    code += "try: run_workers('json.tool', [], 2, LaunchConfig(), {})\nexcept ConfigError as error: print(error)"
    done = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=set_limit(files), capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    message = f"ulimit -n is {files}, which is too few open files for a run; set it higher, as with: ulimit -n 1024\n"
    assert (done.stdout, done.stderr) == (message, "")


def test_invalid_log_level_is_refused() -> None:
    """Oracle: the full stderr; the import of torch itself would end with a traceback."""
    environment = {**os.environ, "LOGLEVEL": "NOPE", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "fsdptoys", "train"], env=environment, capture_output=True, text=True, timeout=120
    )
    message = "LOGLEVEL=NOPE in the environment is no level; set it to DEBUG, INFO, WARNING or ERROR, or unset it"
    assert (done.returncode, done.stderr) == (2, f"fsdptoys: {message}\n")


def test_only_folders_of_killed_launchers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a folder without a lock goes; a living launcher's, a link, a file and other folders stay."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living = LaunchFolder()
    stale, elsewhere = tmp_path / f"{PREFIX}stale", tmp_path / "elsewhere"
    for folder in (stale, elsewhere, tmp_path / "fsdptoys-other"):
        folder.mkdir()
        (folder / "request").write_text("x")
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    (tmp_path / f"{PREFIX}file").write_text("x")
    made = LaunchFolder()
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {living.path.name, made.path.name, "elsewhere", "fsdptoys-other", f"{PREFIX}link", f"{PREFIX}file"}
    assert (elsewhere / "request").exists()
    living.remove()
    made.remove()
    assert not living.path.exists() and not made.path.exists()
