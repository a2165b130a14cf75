"""Resumed runs, compared with the same run without interruption."""

import json
import math
import multiprocessing
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from fsdptoys.errors import ConfigError
from fsdptoys.metrics import Console, ResumePoint, RunRecorder, StepMetrics
from fsdptoys.metrics.results import summarize
from fsdptoys.metrics.resume_log import Resume, starts
from fsdptoys.utils.file_lock import FolderLock
from tests.harness.recording import ENVIRONMENT, ROUTING, STEP, open_recorder

METRICS = Path("run/metrics.jsonl")
SUMMARY = Path("run/summary.md")
RESULTS = {"summary.md", "result.json"}
TREE = {"optim": {"lr": 0.1}, "train": {"steps": 40}}


@pytest.fixture(autouse=True)
def current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def steps_between(first: int, last: int, experts: bool = False) -> list[StepMetrics]:
    """Steps with loss and time as functions of their number."""
    return [
        replace(
            STEP,
            step=number,
            loss=6 - 0.01 * number,
            step_time_seconds=0.1 * number,
            routing=replace(ROUTING, counts=[[number, 1, 4, 4]]) if experts else None,
        )
        for number in range(first, last + 1)
    ]


def start(
    resumed=None, run_dir="run", console=Console.none, world_size=2, **changes
) -> RunRecorder:
    environment = ENVIRONMENT | {"world_size": world_size}
    return open_recorder(
        resumed, run_dir, TREE | changes, environment=environment, console=console
    )


def record(
    recorder: RunRecorder,
    first: int,
    last: int,
    experts: bool = False,
    save_after: int | None = None,
) -> dict:
    """Take steps; return the file offsets after the saved one."""
    offsets: dict[str, int] = {}
    for metrics in steps_between(first, last, experts):
        recorder.step(metrics)
        if metrics.step == save_after:
            offsets = recorder.offsets()
    return offsets


def saved_run(last: int, run_dir: str = "run") -> ResumePoint:
    """Take steps 1 to ``last`` of a run that saves after the last one and is then killed."""
    with start(run_dir=run_dir) as recorder:
        offsets = record(recorder, 1, last, save_after=last)
    return ResumePoint(last, offsets, f"step-{last:08}")


def steps_in(name: str, folder: Path | str = "run") -> list[int]:
    return [
        json.loads(line)["step"] for line in Path(folder, name).read_text().splitlines()
    ]


@pytest.mark.parametrize(
    ("lost", "experts"),
    [
        pytest.param("", True, id="whole"),
        pytest.param('{"step": 28, "lo', False, id="torn"),
        pytest.param('{"step": 28}\n{"st', False, id="alien"),
    ],
)
def test_resumed_run_has_the_files_of_an_uninterrupted_run(lost, experts):
    """Oracle: another folder's bytes, after a start that got 7 steps further than its checkpoint
    and was killed."""
    with start(run_dir="whole") as recorder:
        record(recorder, 1, 40, experts)
        recorder.finish("done")
    with start() as recorder:
        offsets = record(recorder, 1, 27, experts, save_after=20)
    METRICS.write_text(METRICS.read_text() + lost)
    with start(ResumePoint(20, offsets, "step-00000020")) as recorder:
        record(recorder, 21, 40, experts)
        recorder.finish("done")
    for name in ("metrics.jsonl", "config.yaml") + ("routing.jsonl",) * experts:
        assert Path("run", name).read_bytes() == Path("whole", name).read_bytes()
    assert steps_in("metrics.jsonl") == list(range(1, 41))
    assert sorted(os.listdir("run")) == sorted([*os.listdir("whole"), "resumes.jsonl"])
    page = SUMMARY.read_text()
    for text in (
        "\n| steps | 40 of 40; done |\n",
        "\n| first loss | 5.9900 nats |\n",
        "\n| wall time of the last start | ",
        "# Resumes",
        "`resumes.jsonl`",
    ):
        assert text in page
    assert "resumes" not in Path("whole/summary.md").read_text()


def test_medians_exclude_the_warmup_of_every_start():
    """Oracle: steps 1 to 12, resumed after 8, without 1, 2, 9 and 10, at 0.1 s times the step
    number: median 0.65."""
    results = summarize(steps_between(1, 12), 2, starts=[0, 8])
    assert results.step_time_seconds is not None
    assert results.step_time_seconds.median == pytest.approx(0.65)


@pytest.mark.parametrize(
    ("resumed_after", "expected"),
    [
        ([], [0]),
        ([20], [0, 20]),
        ([20, 20, 30], [0, 20, 30]),
        ([30, 20], [0, 20]),
        ([20, 0], [0]),
    ],
)
def test_start_counts_until_its_steps_are_repeated(resumed_after, expected):
    """Oracle: hand-computed values."""
    assert (
        starts([Resume("", step, None, 1, 1, {}, None) for step in resumed_after])
        == expected
    )


def test_each_resume_records_checkpoint_and_changed_settings(capsys):
    """Oracle: the lines of ``resumes.jsonl`` except the time, the rows of the summary, and the
    console lines."""
    first = saved_run(10)
    with start(first, world_size=4, optim={"lr": 0.2, "new": None}) as recorder:
        second = ResumePoint(
            20, record(recorder, 11, 20, save_after=20), "step-00000020"
        )
    with open("run/resumes.jsonl", "a") as file:
        file.write('{"torn')
    with start(
        second, "run", Console.plain, world_size=4, optim={"lr": 0.2}
    ) as recorder:
        recorder.finish("stopped")
    content = Path("run/resumes.jsonl").read_text().replace('{"torn\n', "")
    lines = [json.loads(line) for line in content.splitlines()]
    assert [line.pop("time")[-6:] for line in lines] == ["+00:00"] * 2
    grown = {
        "step": 10,
        "checkpoint": "step-00000010",
        "world_size_before": 2,
        "world_size": 4,
        "moved_to": None,
    }
    same = grown | {"step": 20, "checkpoint": "step-00000020", "world_size_before": 4}
    assert lines == [
        grown | {"changed": {"optim.lr": [0.1, 0.2], "optim.new": [None, None]}},
        same | {"changed": {"optim.new": [None, None]}},
    ]
    page = SUMMARY.read_text()
    assert (
        "| after step 10 | `step-00000010` | 2 → 4 | `optim.lr: 0.1 → 0.2; optim.new: null → null` "
        in page
    )
    assert "| after step 20 | `step-00000020` | 4 | " in page
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "resuming after step 20 from step-00000020"
    assert "20 of 40 steps; stopped" in lines
    assert json.loads(Path("run/environment.json").read_text())["world_size"] == 4


def test_files_of_an_attempt_without_a_checkpoint_are_moved_not_overwritten():
    """Oracle: the files' bytes in ``attempt-1`` and ``attempt-2``; a start with nothing before is
    as without resume."""
    nothing = ResumePoint(0, {}, None)
    contents = []
    for last in (5, 7, 3):
        with start(nothing) as recorder:
            record(recorder, 1, last, experts=True)
            recorder.finish("stopped")
        contents.append(
            {
                path.name: path.read_bytes()
                for path in Path("run").iterdir()
                if path.is_file()
            }
        )
        contents[-1].pop("resumes.jsonl", None)
    assert [
        len(steps_in("metrics.jsonl", f"run{at}"))
        for at in ("/attempt-1", "/attempt-2", "")
    ] == [5, 7, 3]
    for number, content in enumerate(contents[:2], 1):
        assert {
            path.name: path.read_bytes()
            for path in Path(f"run/attempt-{number}").iterdir()
        } == content
    moved = [
        json.loads(line)["moved_to"]
        for line in Path("run/resumes.jsonl").read_text().splitlines()
    ]
    assert moved == ["attempt-1", "attempt-2"]
    page = SUMMARY.read_text()
    assert (
        "\n| steps | 3 of 40; stopped |\n" in page
        and "| from the beginning |  | 2 |  | `attempt-2/` |" in page
    )


@pytest.mark.parametrize("run_dir", ["fork", None])
def test_run_from_another_folder_s_checkpoint_starts_its_own_files(run_dir, capsys):
    """Oracle: steps 21 to 23 only; the other folder is unchanged; the final line counts earlier
    steps."""
    resumed = saved_run(20)
    before = METRICS.read_bytes()
    with start(resumed, run_dir, Console.plain) as recorder:
        record(recorder, 21, 23)
        recorder.finish("stopped")
    assert steps_in("metrics.jsonl", recorder.run_dir) == [21, 22, 23]
    assert Path("run/metrics.jsonl").read_bytes() == before
    out = capsys.readouterr().out
    assert (
        "23 of 40 steps; stopped" in out
        and "median step 2,300.0 ms" in out
        and "bytes" not in out
    )
    assert (
        json.loads((recorder.run_dir / "resumes.jsonl").read_text())["changed"] is None
    )


def test_file_shorter_than_at_the_checkpoint_keeps_its_complete_lines(capsys):
    """Oracle: lines 1 to 14 of 20, the fifteenth being torn; the sentence."""
    resumed = saved_run(20)
    content = METRICS.read_bytes()
    cut = sum(len(line) for line in content.splitlines(keepends=True)[:14]) + 9
    METRICS.write_bytes(content[:cut])
    with start(resumed, console=Console.plain) as recorder:
        record(recorder, 21, 22)
    assert steps_in("metrics.jsonl") == [*range(1, 15), 21, 22]
    assert (
        f"run/metrics.jsonl has {cut} of the {len(content)} bytes recorded in the checkpoint "
        "step-00000020; its complete lines up to step 20 are kept\n"
    ) in capsys.readouterr().out


def test_files_of_another_run_are_moved_not_truncated(capsys):
    """Oracle: all of the other's bytes, in ``attempt-1``: its lines have other lengths than at the
    checkpoint."""
    resumed = saved_run(20, "other")
    with start() as recorder:
        for metrics in steps_between(1, 40):
            recorder.step(replace(metrics, loss=1 / metrics.step))
    before = METRICS.read_bytes()
    with start(resumed, console=Console.plain) as recorder:
        record(recorder, 21, 22)
    assert Path("run/attempt-1/metrics.jsonl").read_bytes() == before
    assert steps_in("metrics.jsonl") == [21, 22]
    assert (
        "run/metrics.jsonl does not match the checkpoint step-00000020 at step 20; it was moved "
        "to run/attempt-1 with the other files of that run\n"
    ) in capsys.readouterr().out


def test_resumed_run_has_no_results_until_it_ends_again():
    """Oracle: the files of the folder, after a start that ended, in the next one, and after that
    one was killed."""
    with start() as recorder:
        offsets = record(recorder, 1, 3, save_after=3)
        recorder.finish("train.max_seconds=1 reached")
    assert set(os.listdir("run")) >= RESULTS
    with start(ResumePoint(3, offsets, "step-3")) as recorder:
        assert not RESULTS & set(os.listdir("run"))
        record(recorder, 4, 4)
    assert not RESULTS & set(os.listdir("run"))
    assert steps_in("metrics.jsonl") == [1, 2, 3, 4]


def lock_forever(sender) -> None:
    lock = FolderLock(Path("run"))
    sender.send("locked")
    threading.Event().wait()
    lock.release()


@pytest.mark.parametrize("resumed", [None, ResumePoint(0, {}, None)])
def test_run_locked_by_another_process_is_rejected(resumed):
    """Oracle: the message with the other's number; once it is killed, the run can resume."""
    Path("run").mkdir()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    other = context.Process(target=lock_forever, args=(sender,))
    other.start()
    try:
        assert receiver.recv() == "locked"
        with pytest.raises(ConfigError) as caught:
            start(resumed)
        assert str(caught.value) == (
            f"metrics.run_dir=run is being written by another run (pid {other.pid}); wait for "
            "its end, or set metrics.run_dir to another folder"
        )
    finally:
        other.kill()
        other.join()
    assert Path("run/.lock").exists()
    with start(resumed) as recorder:
        record(recorder, 1, 1)
        assert Path("run/.lock").read_text() == f"{os.getpid()}\n"
    assert not Path("run/.lock").exists()


def test_failed_start_releases_the_folder(monkeypatch):
    """Oracle: a second start in the same process, after a full disk in the first."""

    def refuse(old, new):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fsdptoys.metrics.run_directory.os.replace", refuse)
        with pytest.raises(
            ConfigError,
            match=r"^metrics\.run_dir=run cannot be written \(No space left on device\)",
        ):
            start()
    assert sorted(os.listdir("run")) == ["metrics.jsonl"]
    start(ResumePoint(0, {}, None)).__exit__(None, None, None)


def test_file_system_without_locks_is_supported(monkeypatch):
    """Oracle: two recorders of one folder at a time; the system's refusal is set by hand."""

    def refuse(descriptor, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with start(), start(ResumePoint(0, {}, None)):
        pass


def test_skipped_steps_and_spikes_are_reported(capsys):
    """Oracle: the lines, the rows and the definitions; means and medians exclude the skipped
    step."""
    steps = steps_between(1, 12)
    steps[6] = replace(
        steps[6], loss=math.nan, grad_norm=math.inf, skipped=True, skipped_steps=1
    )
    steps[8] = replace(steps[8], loss=9.0, loss_spike=12.34)
    with start(console=Console.plain) as recorder:
        for metrics in steps:
            recorder.step(metrics)
        recorder.finish("stopped")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(("step 7", "step 9"))] == [
        "step 7: optimizer step skipped: the loss (nan) or the gradient norm (inf) is not finite; "
        "skipped steps so far: 1",
        (
            "step 9: loss spike: 9.0000 is 12.3 robust standard deviations above the median of "
            "earlier losses"
        ),
    ]
    page = SUMMARY.read_text()
    mean = (sum(6 - 0.01 * n for n in (2, 3, 4, 5, 6, 8, 10, 11, 12)) + 9) / 10
    rows = ["skipped steps | 1", "loss spikes | 1"]
    rows.append(
        f"mean loss of the last 10 steps without skipped ones | {mean:.4f} nats"
    )
    assert not [row for row in rows if f"\n| {row} |\n" not in page]
    assert "- Skipped steps: " in page and "- Loss spike: " in page
    assert summarize(steps, 2).step_time_seconds.median == pytest.approx(0.8)


def test_unreadable_line_is_kept_and_reported(capsys):
    """Oracle: the file's bytes, the sentence, and the results without it."""
    resumed = saved_run(10)
    content = METRICS.read_bytes().replace(b'"step": 4,', b'"step": x,')
    METRICS.write_bytes(content)
    with start(resumed, console=Console.plain) as recorder:
        recorder.finish("stopped")
    assert METRICS.read_bytes() == content
    out = capsys.readouterr().out
    assert (
        "run/metrics.jsonl cannot be read in line 4; results and plots omit it\n" in out
    )
    assert "10 of 40 steps; stopped" in out
