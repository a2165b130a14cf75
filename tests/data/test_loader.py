"""Batches of worker processes compared with those of the main process, and the end of the
workers."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from fsdptoys.data import BatchStream, check_shared_memory
from fsdptoys.data.byte_text import TextConfig
from fsdptoys.data.loader import SHARED_MEMORY
from fsdptoys.errors import ConfigError
from tests.harness.clean_process import ROOT
from tests.harness.prepared_data import living_in_group
from tests.harness.processes import wait_until
from tests.harness.ranks import run_ranks

LAYOUT = {
    "batch_size": 3,
    "microbatches": 2,
    "ranks": range(1, 3),
    "data_ranks": 4,
    "seed": 7,
}


def open_stream(path: Path, workers: int) -> BatchStream:
    """Ranks 1 and 2 of 4, with 24 of 100 samples a step, so that epochs end within steps."""
    dataset = TextConfig([str(path)], eval_fraction=0.0).build(10, 256, 0)
    return BatchStream(
        dataset.train, **LAYOUT, fingerprint=dataset.fingerprint, workers=workers
    )


def assert_equal_steps(stream: BatchStream, reference: BatchStream, steps: int) -> None:
    for _ in range(steps):
        for batch, expected in zip(
            stream.next_step(), reference.next_step(), strict=True
        ):
            for tensor, other in zip(batch, expected, strict=True):
                assert tensor.dtype == other.dtype == torch.int64 and torch.equal(
                    tensor, other
                )
        assert stream.state_dict() == reference.state_dict()


def compare(path: Path) -> list[tuple[int, ...]]:
    """Run in a separate process, since processes forked by other tests must not inherit the
    workers' server."""
    reference = open_stream(path, 0)
    stream = open_stream(path, 2)
    random_state = torch.get_rng_state()
    assert_equal_steps(stream, reference, 10)
    assert torch.equal(torch.get_rng_state(), random_state), (
        "the run's random numbers must not depend on workers"
    )
    state = stream.state_dict()
    assert_equal_steps(stream, reference, 3)
    for either in (stream, reference):  # back, over prefetched steps
        either.load_state_dict(state)
    assert_equal_steps(stream, reference, 3)
    resumed = open_stream(path, 1)
    resumed.load_state_dict(stream.state_dict())
    assert_equal_steps(resumed, reference, 2)
    for either in (stream, resumed):
        either.close()
        either.close()
    assert_equal_steps(resumed, reference, 1)
    resumed.close()
    return [tuple(tensor.shape) for tensor in reference.next_step()[0]]


def lose_a_worker(path: Path) -> str:
    stream = open_stream(path, 2)
    stream.next_step()
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        for _ in range(20):
            stream.next_step()
    stream.close()
    assert not multiprocessing.active_children()
    return str(caught.value)


def shorten_the_file(path: Path) -> list[str]:
    streams = [open_stream(path, workers) for workers in (0, 1)]
    path.write_bytes(b"short")
    sentences = []
    for stream in streams:
        with pytest.raises(ConfigError) as caught:
            stream.next_step()
        sentences.append(str(caught.value))
        stream.close()
    return sentences


@pytest.fixture(scope="module")
def in_worker_process(tmp_path_factory):
    """Results of the three functions above.

    In a process of their own, since the server must not be inherited by processes that other tests
    fork; in one, since each server imports PyTorch.
    """
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_bytes(
        bytes(
            torch.randint(
                1, 256, (1001,), generator=torch.Generator().manual_seed(0)
            ).tolist()
        )
    )

    def body():
        return compare(path), lose_a_worker(path), shorten_the_file(path)

    return run_ranks(1, body)[0]


def test_batches_and_state_do_not_depend_on_workers(in_worker_process):
    """Oracle: a stream without workers, over two epochs, after going back, after a resume and after
    ``close``."""
    assert in_worker_process[0] == [(3, 10), (3, 10)]


def test_killed_worker_raises_an_error_instead_of_hanging(in_worker_process):
    """Oracle: the expected message, within the test's time; the other worker ends with
    ``close``."""
    sentence = in_worker_process[1]
    assert sentence.startswith("a data worker has ended (pid ") and sentence.endswith(
        "): it was killed, or there was too little host memory or shared memory (/dev/shm); "
        "data.workers=0 reads without workers"
    )


def test_worker_errors_equal_those_without_workers(in_worker_process):
    """Oracle: the expected message of a stream without workers."""
    without, with_workers = in_worker_process[2]
    assert with_workers == without and "fewer than the 1001 bytes" in without


SCRIPT = """
import signal, sys
from fsdptoys.data import BatchStream
from fsdptoys.data.synthetic import SyntheticConfig

received = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: received.append(number))
stream = BatchStream(SyntheticConfig().build(8, 32, 0).train, 2, 1, range(1), 1, 0, workers=2)
stream.next_step()
print("begun", flush=True)
while len(set(received)) < 3:
    stream.next_step()
for _ in range(50):
    stream.next_step()
print("still here after", sorted(set(received)), flush=True)
if sys.argv[1] == "killed":
    sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("end", ["exit", "killed"])
def test_workers_survive_signals_and_end_with_their_rank(end):
    """Oracle: all processes of the rank's group receive the signals and training continues; none is
    left at the end."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    rank = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, end], **pipes, cwd=ROOT, start_new_session=True
    )
    try:
        assert rank.stdout is not None and rank.stdout.readline() == "begun\n"
        assert len(living_in_group(rank.pid)) >= 4, (
            "the rank, the server and two workers"
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.killpg(rank.pid, number)
        assert rank.stdout.readline() == "still here after [2, 10, 15]\n"
        if end == "killed":
            rank.kill()
        wait_until(lambda: rank.poll() is not None, "the end of the rank", [rank.pid])
        assert rank.returncode == (-signal.SIGKILL if end == "killed" else 0)
        wait_until(
            lambda: not living_in_group(rank.pid),
            "the end of its workers",
            living_in_group(rank.pid),
        )
    finally:
        rank.kill()
        if living_in_group(rank.pid):
            os.killpg(rank.pid, signal.SIGKILL)


SMALL_SHARED_MEMORY = """
from fsdptoys.data import BatchStream
from fsdptoys.data.synthetic import SyntheticConfig
from fsdptoys.errors import ConfigError

stream = BatchStream(SyntheticConfig().build(8192, 32, 0).train, 16, 1, range(1), 1, 0, workers=1)
try:
    stream.next_step()
except ConfigError as mistake:
    print(mistake)
stream.close()
"""


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0,
    reason="mounts a small /dev/shm of its own",
)
@pytest.mark.parametrize(
    ("size", "reason"),
    [("4k", "No space left on device"), ("1m", "[^\n]*No space left on device[^\n]*")],
)
def test_full_shared_memory_is_reported_in_one_sentence(size, reason):
    """Oracle: the message alone, without space for a semaphore, and without space for a step of 2
    MiB."""
    mounted = [
        "unshare",
        "-m",
        "sh",
        "-c",
        f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"',
        "sh",
    ]
    if subprocess.run([*mounted, "true"], capture_output=True).returncode:
        pytest.skip("no mounts here")
    process = subprocess.run(
        [*mounted, sys.executable, "-c", SMALL_SHARED_MEMORY],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert re.fullmatch(
        rf"data\.workers=1 passes batches through /dev/shm, which takes no more \({reason}\); set "
        r"data\.workers=0, or give /dev/shm more memory \(docker run --shm-size\)\n",
        process.stdout,
    ), process.stdout + process.stderr
    assert process.stderr == ""


@pytest.mark.skipif(not Path(SHARED_MEMORY).is_dir(), reason="needs /dev/shm")
def test_shared_memory_is_checked_before_workers_start():
    """Oracle: the expected message, for steps of 1 PiB; 1 byte a step, no workers, or no such place
    are no mistake."""
    with pytest.raises(
        ConfigError,
        match=r"^data\.workers=2 passes batches through /dev/shm, which has [\d.e+]+ MiB free, and "
        r"4 ranks need 2\.147e\+10 MiB; set data\.workers=0, or give /dev/shm more memory "
        r"\(docker run --shm-size\)$",
    ):
        check_shared_memory(2, 2**50, 4)
    check_shared_memory(2, 1, 1)
    check_shared_memory(0, 2**50, 4)
    check_shared_memory(2, 2**50, 4, mount="/nowhere")


def test_too_long_temporary_folder_for_sockets_is_refused(monkeypatch):
    """Oracle: the expected message; 107 bytes are Linux's limit; multiprocessing's names take 32 of
    them."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + 71 * "a")
    with pytest.raises(
        ConfigError,
        match=r"a, whose path may have 75 bytes for that; set TMPDIR to a shorter one or ",
    ):
        check_shared_memory(1, 1, 1)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + 70 * "a")
    check_shared_memory(1, 1, 1)
