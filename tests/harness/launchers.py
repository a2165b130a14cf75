"""Launchers in processes of their own, with workers that fail, hang or stop on command."""

import contextlib
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptoys.config.launch_config import LaunchConfig
from fsdptoys.launch.supervisor import run_workers
from tests.harness.processes import wait_until

WORKER = """
import os, signal, sys, time
from pathlib import Path

rank, start = int(os.environ["RANK"]), int(os.environ["FSDPTOYS_RESTARTS"])

def leave(name, text=""):
    Path(f"{name}.part").write_text(text)
    os.rename(f"{name}.part", name)

def sleep():
    leave(f"ready{rank}", str(os.getpid()))
    while True:  # a Python handler waits for the end of a sleep that starts just after its signal
        time.sleep(0.01)

def deaf():
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: leave(f"heard{rank}"))
    sleep()

def nothing():
    pass

def environment():
    leads = os.getsid(0) == os.getpid()
    print(os.environ["OMP_NUM_THREADS"], rank, leads, sys.argv[1:], flush=True)
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    print([signal.getsignal(number).name for number in numbers], flush=True)
    print([Path(name).name for name in os.listdir("/proc/self/fd") if int(name) > 3], flush=True)
    print("" in sys.path, os.getcwd() in sys.path, __name__, sys.stdin.fileno(), flush=True)

def exit():
    if rank == 1:
        sys.exit(7)
    time.sleep(600)

def worse():
    if rank == 1 and start == 0:
        sys.exit(7)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)

def group():
    import torch.distributed as dist
    from fsdptoys.train.launch_env import open_rank_store
    world_size = int(os.environ["WORLD_SIZE"])
    store = open_rank_store(world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return dist

def use(beats, dist):
    from fsdptoys.train.heartbeat import HeartbeatWriter
    from fsdptoys.train.launch_env import remember_run_dir
    remember_run_dir(beats.parent)
    heartbeat = HeartbeatWriter(beats, rank)
    dist.barrier()
    return heartbeat

def fail():
    from fsdptoys.train.stop import StopRequest
    leave(f"ready{rank}", str(os.getpid()))
    with StopRequest():
        dist = group()
        dist.barrier()
        if rank == 1:
            raise ZeroDivisionError("nothing to divide by")
        if rank == 2:
            time.sleep(3600)
        dist.barrier()

def mistake():
    from fsdptoys.errors import ConfigError
    raise ConfigError("train.steps=0 must be at least 1; set train.steps=1")

def stop():
    import torch
    from fsdptoys.train.stop import StopRequest
    dist = group()
    with StopRequest() as request:
        dist.barrier()
        leave(f"ready{rank}", str(os.getpid()))
        asked = torch.zeros(())
        while not asked:
            time.sleep(0.01)
            asked = torch.tensor(float(request.received is not None))
            dist.all_reduce(asked)
        while request.received is None:  # the other rank's signal came first
            time.sleep(0.01)
        leave(f"saved{rank}", str(request.received))
    dist.barrier()
    dist.destroy_process_group()

def hang():
    import torch
    from fsdptoys.train.stop import StopRequest
    dist = group()
    with StopRequest():
        dist.barrier()
        leave(f"ready{rank}", str(os.getpid()))
        if rank == 0:
            dist.all_reduce(torch.ones(()))
        time.sleep(600)

def lose():
    from fsdptoys.train.heartbeat import explain_lost_ranks
    dist, beats = group(), Path("run/heartbeats")
    heartbeat = use(beats, dist)
    heartbeat.beat(3, "forward")
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    heartbeat.beat(3, "backward")
    with explain_lost_ranks(beats, rank, 2, {"launch.timeout_seconds": 600}):
        dist.barrier()

def wait():
    from datetime import timedelta
    from fsdptoys.train.heartbeat import explain_lost_ranks
    from fsdptoys.train.stop import StopRequest
    dist, beats = group(), Path("run/heartbeats")
    heartbeat = use(beats, dist)
    with StopRequest():
        heartbeat.beat(3, "backward")
        dist.barrier()
        if rank == 1:
            time.sleep(600)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
        with explain_lost_ranks(beats, rank, 2, {"launch.timeout_seconds": 3}):
            dist.barrier()

def asked():
    from fsdptoys.train.stop import StopRequest
    dist = group()
    with StopRequest() as request:
        dist.barrier()
        leave(f"ready{rank}", str(os.getpid()))
        if rank == 1:
            while request.received is None:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
        dist.barrier()

def early():
    group().barrier()
    leave(f"ready{rank}", str(os.getpid()))
    time.sleep(600)

def semaphores():
    import multiprocessing
    made = multiprocessing.get_context("spawn").Semaphore()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    leave(f"children{rank}", " ".join(children) + " " + made._semlock.name)
    leave(f"ready{rank}", str(os.getpid()))
    time.sleep(600)

def again():
    from fsdptoys.train.launch_env import remember_run_dir, remembered_run_dir, restart_count
    assert restart_count() == start
    dist = group()
    if start == 0:
        assert remembered_run_dir() is None
    dist.barrier()
    if start == 0:
        remember_run_dir(Path("run"))
        dist.barrier()
        if rank == 0:
            raise ZeroDivisionError("nothing to divide by")
    if start == 1 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    leave(f"done{rank}", f"{start} {remembered_run_dir()}")
    dist.barrier()
    dist.destroy_process_group()
"""

INTERPRETERS = (
    "sleep",
    "deaf",
    "nothing",
    "environment",
    "exit",
    "worse",
    "semaphores",
)
"""Workers without torch, which run in new interpreters; the others are forks of their launcher."""

WORKER += f"""
if sys.argv[1] in {INTERPRETERS}:
    sys.exit(globals()[sys.argv[1]]())
from fsdptoys.launch.worker import run_as_worker
sys.exit(run_as_worker(globals()[sys.argv[1]]))
"""


@dataclass
class Launched:
    """A launcher, forked from this process."""

    process: Any
    folder: Path
    ranks: int

    @property
    def pid(self) -> int:
        """Of the launcher."""
        return int(self.process.pid)

    def wait_for_files(self, name: str) -> list[str]:
        """Wait until every rank has left a file of this name, and return their contents."""
        paths = [self.folder / f"{name}{rank}" for rank in range(self.ranks)]
        wait_until(
            lambda: all(path.exists() for path in paths) or not self.process.is_alive(),
            f"{name} of all",
            [self.pid],
        )
        assert all(path.exists() for path in paths), (
            self.folder / "stderr"
        ).read_text()
        return [path.read_text() for path in paths]

    def workers(self) -> list[int]:
        """Process ids of all workers, once all are ready."""
        return [int(text) for text in self.wait_for_files("ready")]

    def result(self) -> tuple[int, str]:
        """Exit status and stderr."""
        wait_until(
            lambda: not self.process.is_alive(), "the end of the launcher", [self.pid]
        )
        return self.process.exitcode, (self.folder / "stderr").read_text()


def launch(folder: Path, how: str, ranks: int, options: dict[str, Any]) -> None:
    """Be a launcher with streams in the folder, which is its own."""
    (folder / "toy_worker.py").write_text(WORKER)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), stream)
    # not pytest's
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w")
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    for name in [
        name
        for name in os.environ
        if how in INTERPRETERS and name.startswith("COVERAGE_PROCESS_")
    ]:
        del os.environ[name]  # they run no measured line
    forks = options.pop("forks", how not in INTERPRETERS)
    settings = LaunchConfig(**options)
    environment = {"OMP_NUM_THREADS": "1"}
    os._exit(
        run_workers("toy_worker", [how], ranks, settings, environment, forks=forks)
    )


def runs(pid: int) -> bool:
    """Whether a process has not ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    return False


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
