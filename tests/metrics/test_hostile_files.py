"""A run directory from elsewhere: links that lead out of it, pipes, devices, and files that no run
writes."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fsdptoys.errors import ConfigError
from fsdptoys.launch.exit_record import (
    EXIT_RECORD_VARIABLE,
    ExitRecord,
    write_exit_record,
)
from fsdptoys.metrics import (
    Console,
    MetricsConfig,
    ResumePoint,
    check_run_dir,
    lock_run_dir,
)
from fsdptoys.metrics.config import RUN_FILES, RUN_FOLDERS
from fsdptoys.metrics.resume_log import read_resumes, read_steps
from fsdptoys.sweep.folder import Job, write_job
from fsdptoys.train.heartbeat import HeartbeatWriter
from fsdptoys.utils.file_lock import LOCK_FILE, FolderLock, is_locked
from tests.harness.process_memory import NEEDS_PEAK, peak_growth_bytes
from tests.harness.ranks import run_ranks
from tests.harness.recording import STEP, open_recorder

PRECIOUS = b"precious\n"
KINDS = {
    "link": "symbolic link",
    "dangling link": "symbolic link",
    "device link": "symbolic link",
    "pipe": "named pipe",
    "folder": "folder",
}
"""Replacement of a file → its name in messages."""
FILES = [name for name in RUN_FILES if name not in RUN_FOLDERS]
METRICS = Path("run/metrics.jsonl")


@pytest.fixture(autouse=True)
def scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a temporary folder, beside a file that must not change and a name that must stay
    free."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious").write_bytes(PRECIOUS)
    yield
    assert (tmp_path / "precious").read_bytes() == PRECIOUS
    assert not (tmp_path / "nowhere").exists()


def replace_by(kind: str, path: Path) -> None:
    """Put something in the place of a file."""
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        target = {
            "link": "precious",
            "dangling link": "nowhere",
            "device link": "/dev/zero",
        }[kind]
        path.symlink_to(Path(target).absolute())


def record(
    resumed: ResumePoint | None, *numbers: int, finish: bool = True
) -> dict[str, int]:
    with open_recorder(resumed) as recorder:
        for number in numbers:
            recorder.step(replace(STEP, step=number))
        offsets = recorder.offsets()
        if finish:
            recorder.finish("done")
    return offsets


def recorded_steps() -> list[int]:
    return [step.step for step in read_steps(METRICS)[0]]


@pytest.fixture
def resumed() -> ResumePoint:
    """Take two steps of a run."""
    return ResumePoint(2, record(None, 1, 2, finish=False), "step-00000002")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_irregular_file_is_rejected_before_anything_is_written(
    name: str, kind: str, resumed: ResumePoint
) -> None:
    """Oracle: one sentence that names file and fix, from the launcher's check and the run; nothing
    changes."""
    replace_by(kind, Path("run", name))
    before = {path.name: path.lstat().st_mtime_ns for path in Path("run").iterdir()}
    for attempt in (
        lambda: check_run_dir(MetricsConfig(run_dir="run"), resumes=True),
        lambda: record(resumed, 3),
        lambda: record(ResumePoint(0, {}, None), 1),
    ):
        with pytest.raises(ConfigError) as raised:
            attempt()
        assert str(raised.value) == (
            f"run/{name} is a {KINDS[kind]} and not a regular file; remove it, or set "
            "metrics.run_dir to another folder"
        )
    assert before == {
        path.name: path.lstat().st_mtime_ns for path in Path("run").iterdir()
    }


@pytest.mark.parametrize("name", ["heartbeats", "weights", "flight_recorder"])
def test_symbolic_link_in_place_of_a_run_folder_is_rejected(
    name: str, resumed: ResumePoint
) -> None:
    """Oracle: one sentence from the launcher's check; a rank that skips the check writes nothing
    elsewhere."""
    Path("elsewhere").mkdir()
    Path("elsewhere/rank-00000.json").write_text("precious")
    Path("run", name).symlink_to(Path("elsewhere").absolute())
    with pytest.raises(
        ConfigError,
        match=rf"^run/{name} is a symbolic link and not a folder of this run; remove it",
    ):
        check_run_dir(MetricsConfig(run_dir="run"), resumes=True)
    heartbeat = HeartbeatWriter(Path("run", name), 0)
    heartbeat.beat(1, "forward")
    heartbeat.close()
    assert Path("elsewhere/rank-00000.json").read_text() == "precious"
    assert os.listdir("elsewhere") == ["rank-00000.json"]


def test_profile_folder_may_be_a_link_to_a_folder_only(resumed: ResumePoint) -> None:
    """Oracle: a run with its profiles on another disk resumes; a pipe of that name is one
    sentence."""
    Path("elsewhere").mkdir()
    Path("run/profile").symlink_to(Path("elsewhere").absolute())
    check_run_dir(MetricsConfig(run_dir="run"), resumes=True)
    replace_by("pipe", Path("run/profile"))
    with pytest.raises(
        ConfigError,
        match=r"^run/profile is a named pipe and not a folder; remove it, or set metrics",
    ):
        check_run_dir(MetricsConfig(run_dir="run"), resumes=True)


@pytest.mark.parametrize("kind", KINDS)
def test_lock_must_be_a_regular_file(kind: str) -> None:
    """Oracle: one sentence, with and without the launcher's check, for new and for resumed runs."""
    Path("run").mkdir()
    replace_by(kind, Path("run", LOCK_FILE))
    for attempt in (
        lambda: check_run_dir(MetricsConfig(run_dir="run")),
        lambda: check_run_dir(MetricsConfig(run_dir="run"), resumes=True),
        lambda: lock_run_dir(Path("run")),
        lambda: record(None, 1),
    ):
        with pytest.raises(
            ConfigError,
            match=r"^run/\.lock is a .+ and not a regular file; remove it, or set metrics",
        ):
            attempt()
    assert not is_locked(Path("run"))


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "device link"])
def test_existing_temporary_file_is_replaced(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the complete files under their names; the target of the link is unchanged."""
    monkeypatch.setenv(EXIT_RECORD_VARIABLE, "outcome")
    Path("run").mkdir()
    for name in ("config.yaml", "environment.json", "summary.md", "loss.png"):
        for part in (f".{name}.part", f".{name}.{os.getpid()}.part"):
            replace_by(kind, Path("run", part))
    for part in ("job.json", "outcome"):
        replace_by(kind, Path(f".{part}.{os.getpid()}.part"))
    record(None, 1, 2)
    write_job(Path(), Job("01", (), {}, "abc"))
    write_exit_record(ExitRecord(0))
    run_files = [
        Path("run", name) for name in ("config.yaml", "loss.png", "summary.md")
    ]
    for path in (*run_files, Path("job.json"), Path("outcome")):
        assert path.is_file() and not path.is_symlink()


@pytest.mark.parametrize("kind", KINDS)
def test_heartbeat_replaces_an_existing_file(kind: str) -> None:
    """Oracle: the record of the rank where it can be written; a run can do without one."""
    Path("beats").mkdir()
    replace_by(kind, Path("beats/rank-00000.json"))
    heartbeat = HeartbeatWriter(Path("beats"), 0)
    heartbeat.beat(7, "forward")
    heartbeat.close()
    if kind != "folder":
        assert json.loads(Path("beats/rank-00000.json").read_text())["step"] == 7


DEEP = "[" * 200_000
HUGE = "1" + "0" * 400
LINE = json.loads(STEP.to_json())


INVALID_LINES = {
    "deep": DEEP,
    "deep value": '{"step": 3, "x": ' + DEEP,
    "huge loss": STEP.to_json().replace("5.5", HUGE),
    "infinite loss": STEP.to_json().replace("5.5", "1e999"),
    "huge tokens": STEP.to_json().replace("512,", f"{HUGE},"),
    "huge step": STEP.to_json().replace('"step": 1', f'"step": {10**30}'),
    "0 s": json.dumps(LINE | {"step_time_seconds": 0}),
    "-1 s": json.dumps(LINE | {"step_time_seconds": -1.0}),
    "nan s": json.dumps(
        LINE | {"step_time_seconds": None, "non_finite": ["step_time_seconds"]}
    ),
    "-5 tokens": json.dumps(LINE | {"valid_tokens": -5}),
}


@pytest.mark.parametrize("line", INVALID_LINES.values(), ids=INVALID_LINES)
def test_invalid_metrics_line_is_reported_and_omitted(
    line: str, resumed: ResumePoint
) -> None:
    """Oracle: the expected message for such a line; the run ends well, with the steps that can be
    read."""
    METRICS.write_text(f"{line}\n{METRICS.read_text()}")
    assert read_steps(METRICS)[1] == [
        "run/metrics.jsonl cannot be read in line 1; results and plots omit it"
    ]
    offset = len(line) + 1 + resumed.offsets["metrics.jsonl"]
    record(replace(resumed, offsets={"metrics.jsonl": offset}), 3, 4)
    assert recorded_steps() == [1, 2, 3, 4]


def growth_of_reading(resumes: Path) -> int:
    return peak_growth_bytes(lambda: (recorded_steps(), read_resumes(resumes)))


@NEEDS_PEAK
def test_endless_lines_are_not_read_into_memory(resumed: ResumePoint) -> None:
    """Oracle: the peak of the resident set, against the length of the line; the lines beside it are
    read."""
    record(resumed, 3)
    resumes = Path("run/resumes.jsonl")
    for path in (METRICS, resumes):
        lines = path.read_bytes()
        os.truncate(path, 2**28)
        with path.open("ab") as file:
            file.write(b"\n" + lines)
    assert recorded_steps() == [1, 2, 3] * 2 and len(read_resumes(resumes)) == 2
    growth = run_ranks(1, growth_of_reading, resumes)[0]
    assert growth < 2**27


UNREADABLE = {
    "deep": DEEP,
    "recursive": "a: &a {b: *a}",
    "odd keys": "a: .inf\n1: [x]\n? [1]\n: x",
    "list": "- x",
}


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("name", ["config.yaml", "environment.json"])
def test_unreadable_settings_count_as_missing(
    name: str, text: str, resumed: ResumePoint
) -> None:
    """Oracle: the run completes, and the files are rewritten."""
    Path("run", name).write_text(text)
    record(resumed, 3, finish=False)
    assert recorded_steps() == [1, 2, 3]
    assert len(read_resumes(Path("run/resumes.jsonl"))) == 1
    assert "train" in Path("run/config.yaml").read_text()


RESUME = {"time": "t", "step": 1, "checkpoint": "c", "changed": {}, "moved_to": None}
RESUME |= {"world_size_before": 2, "world_size": 2}


@pytest.mark.parametrize(
    "change",
    [{"changed": "x"}, {"changed": {"a": 1}}, {"changed": {"a": [1]}}, {"time": 5}, {"step": -1},
     {"step": 10**30}, {"step": "x"}, {"step": None}, {"step": 1.5}, {"world_size": "x"},
     {"moved_to": 3}, {"checkpoint": []}, {"more": 1}],
    ids=str,
)  # fmt: skip
def test_invalid_resume_line_is_omitted(change: dict, resumed: ResumePoint) -> None:
    """Oracle: the summary of a run that resumes after such a line and after a deeply nested one."""
    path = Path("run/resumes.jsonl")
    path.write_text(
        "\n".join([json.dumps(RESUME | change), DEEP, json.dumps(RESUME)]) + "\n"
    )
    assert [resume.step for resume in read_resumes(path)] == [1]
    record(resumed, 3)
    assert [resume.step for resume in read_resumes(path)] == [1, 2]
    assert "## Resumes" in Path("run/summary.md").read_text()


def test_link_that_appears_during_the_run_has_no_offset() -> None:
    """Oracle: one sentence at the checkpoint, and not the size of the file behind the link."""
    with open_recorder() as recorder:
        recorder.step(STEP)
        replace_by("link", Path("run/routing.jsonl"))
        with pytest.raises(
            ConfigError,
            match=r"^run/routing.jsonl is a symbolic link and not a regular file",
        ):
            recorder.offsets()


def other_file(path: Path) -> None:
    path.unlink()
    path.write_text("theirs\n")


REMOVED = (
    "run/metrics.jsonl was removed during the run; its lines have been written again"
)
REPLACED = (
    "run/metrics.jsonl was replaced during the run; the other file is now "
    "metrics.jsonl.replaced-1, and the lines of the run have been written again"
)


@pytest.mark.parametrize(
    ("lose", "message"),
    [
        (Path.unlink, REMOVED),
        (lambda path: path.rename("moved"), REMOVED),
        (other_file, REPLACED),
    ],
    ids=["rm", "mv", "edit"],
)
@pytest.mark.parametrize("saves", [True, False])
def test_lines_survive_the_loss_of_their_file(
    lose: Callable[[Path], None],
    message: str,
    saves: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: every step is in the file at the next checkpoint and at the end, and the console
    reports it."""
    with open_recorder(console=Console.plain) as recorder:
        for step in (1, 2, 3, 4):
            recorder.step(replace(STEP, step=step))
            if step == 2:
                lose(METRICS)
            if step == 3 and saves:
                assert recorder.offsets()["metrics.jsonl"] == METRICS.stat().st_size > 0
                assert recorded_steps() == [1, 2, 3]
        recorder.finish("done")
    assert recorded_steps() == [1, 2, 3, 4]
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "metrics.jsonl was" in line] == [message]
    if message == REPLACED:
        assert Path("run/metrics.jsonl.replaced-1").read_text() == "theirs\n"


def test_lines_survive_the_loss_of_their_file_in_a_failed_run() -> None:
    """Oracle: the completed steps, after an exception."""
    with pytest.raises(ZeroDivisionError), open_recorder() as recorder:
        recorder.step(STEP)
        METRICS.unlink()
        raise ZeroDivisionError
    assert recorded_steps() == [1]


def test_removed_lock_file_admits_no_second_writer() -> None:
    """Oracle: the expected message for a second writer until the first releases the lock; readers
    see the lock."""
    Path("run").mkdir()
    first = FolderLock(Path("run"))
    Path("run", LOCK_FILE).unlink()
    assert is_locked(Path("run"))
    with pytest.raises(
        ConfigError,
        match=r"^metrics\.run_dir=run is being written by another run \(pid unknown\); ",
    ):
        FolderLock(Path("run"))
    assert not Path("run", LOCK_FILE).exists()
    first.release()
    assert not is_locked(Path("run"))
    FolderLock(Path("run")).release()
    assert not list(Path("run").iterdir())
