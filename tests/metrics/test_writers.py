"""TensorBoard and Weights & Biases receive the values of the run's own files, and cannot end a
run."""

import contextlib
import importlib.machinery
import io
import json
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import methodcaller
from pathlib import Path

import pytest

from fsdptoys.errors import ConfigError
from fsdptoys.metrics import (
    Console,
    MetricsConfig,
    ResumePoint,
    RunRecorder,
    StepMetrics,
    check_run_dir,
)
from fsdptoys.metrics.config import WandbMode
from fsdptoys.metrics.writers import Writers
from tests.harness.recording import ROUTING, STEP, TREE, open_recorder


def step_of(number: int, shift: float = 0.0) -> StepMetrics:
    """A step that differs from its neighbors; every fourth is evaluated, and the sixth is
    skipped."""
    return replace(
        STEP,
        step=number,
        loss=5.5 - 0.01 * number + shift,
        eval_loss=5.0 if number % 4 == 0 else None,
        skipped=number == 6,
        grad_norm=float("inf") if number == 6 else 1.0 / number,
        routing=ROUTING,
    )


def recorder_with(
    folder: Path, writers: list[str], resumed: ResumePoint | None = None
) -> RunRecorder:
    mode = WandbMode.offline if "wandb" in writers else None
    return open_recorder(
        resumed,
        folder,
        steps=8,
        console=Console.plain,
        writers=writers,
        wandb_mode=mode,
        log_every=1,
    )


@dataclass(frozen=True)
class Outcome:
    """Output of a run that fails after step 6 and resumes from a checkpoint of step 4."""

    folder: Path
    printed: str
    requests: int
    """Connections to the proxy that the environment names for all requests."""

    def lines(self) -> list[dict[str, float | None]]:
        """The lines of ``metrics.jsonl``."""
        return [
            json.loads(line)
            for line in (self.folder / "metrics.jsonl").read_text().splitlines()
        ]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    home = tmp_path_factory.mktemp("home")
    folder = tmp_path_factory.mktemp("runs") / "run"
    printed = io.StringIO()
    proxy = socket.create_server(("127.0.0.1", 0))
    proxy.setblocking(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        for name in (
            "HTTP_PROXY",
            "HTTPS_PROXY",
            "http_proxy",
            "https_proxy",
            "ALL_PROXY",
        ):
            patch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            with (
                contextlib.suppress(ZeroDivisionError),
                recorder_with(folder, ["tensorboard", "wandb"]) as recorder,
            ):
                for number in range(1, 7):
                    recorder.step(step_of(number))
                    if number == 4:
                        offsets = recorder.offsets()
                raise ZeroDivisionError
            resumed = ResumePoint(4, offsets, "step-00000004")
            with recorder_with(folder, ["tensorboard", "wandb"], resumed) as recorder:
                for number in range(5, 9):
                    recorder.step(step_of(number, shift=1.0))
                recorder.finish("all steps done")
        import wandb

        wandb.teardown()
    requests = 0
    with contextlib.suppress(BlockingIOError), proxy:
        while True:
            proxy.accept()[0].close()
            requests += 1
    yield Outcome(folder, printed.getvalue(), requests)


def test_event_files_have_each_step_once(outcome: Outcome) -> None:
    """Oracle: ``metrics.jsonl``, compared number by number with TensorBoard's own reader; repeated
    steps count once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(
        str(outcome.folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}
    )
    events.Reload()
    lines = outcome.lines()
    assert [line["step"] for line in lines] == [*range(1, 9)]
    names = {name for line in lines for name in line} - {"step", "non_finite"}
    for name in names:
        expected = {
            line["step"]: float(line[name])
            for line in lines
            if line.get(name) is not None
        }
        if name == "grad_norm":
            expected = dict(sorted((expected | {6: float("inf")}).items()))
        if not expected:
            assert name not in events.Tags()["scalars"]
            continue
        scalars = events.Scalars(name)
        assert [event.step for event in scalars] == list(expected), name
        assert [event.value for event in scalars] == pytest.approx(
            list(expected.values()), rel=1e-6
        ), name
    (config,) = events.Tensors("config/text_summary")[-1:]
    assert b"dim: 64" in config.tensor_proto.string_val[0]
    assert events.Tags()["images"] == ["loss_curve"]
    assert events.Images("loss_curve")[0].encoded_image_string.startswith(b"\x89PNG")


def records_of(path: Path) -> list:
    """The records of a file of Weights & Biases: LevelDB's log format after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    offset = 7
    records = []
    parts = b""
    assert content[:4] == b":W&B"
    while offset < len(content):
        room = 32768 - offset % 32768
        if room < 7:
            offset += room
            continue
        length = int.from_bytes(content[offset + 4 : offset + 6], "little")
        kind = content[offset + 6]
        parts += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return records


def test_wandb_has_both_starts_under_one_id(outcome: Outcome) -> None:
    """Oracle: the recorded steps, settings and results, read from its files by its own record
    type."""
    files = sorted(
        (outcome.folder / "wandb").glob("offline-run-*/*.wandb"),
        key=lambda path: path.stat().st_mtime_ns,
    )
    assert len(files) == 2
    histories = []
    summary = {}
    for path, exit_code in zip(files, (1, 0), strict=True):
        records = records_of(path)
        assert {record.run.run_id for record in records if record.HasField("run")} == {
            (outcome.folder / "wandb" / "run_id.txt").read_text().strip()
        }
        assert [
            record.exit.exit_code for record in records if record.HasField("exit")
        ] == [exit_code]
        (run, *_) = [record.run for record in records if record.HasField("run")]
        config = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert config["model"] == TREE["model"] and config["title"] == "tiny"
        histories.append([
            {
                (item.key or item.nested_key[0]): json.loads(item.value_json)
                for item in record.history.item
            }
            for record in records
            if record.HasField("history")
        ])  # fmt: skip
        for record in records:
            for item in record.summary.update:
                summary[item.key or ".".join(item.nested_key)] = json.loads(
                    item.value_json
                )
    for history, steps in zip(
        histories,
        ([step_of(n) for n in range(1, 7)], [step_of(n, 1.0) for n in range(5, 9)]),
        strict=True,
    ):
        assert [values["step"] for values in history] == [
            metrics.step for metrics in steps
        ]
        for values, metrics in zip(history, steps, strict=True):
            numbers = metrics.numbers()
            assert set(numbers) <= set(values)
            assert [float(values[name]) for name in numbers] == pytest.approx(
                list(numbers.values())
            )
    assert summary["stop_reason"] == "all steps done"
    assert summary["results"]["skipped_steps"] == 1 and summary["results"]["steps"] == 8


def test_offline_makes_no_request_and_prints_nothing(outcome: Outcome) -> None:
    """Oracle: a proxy set for every request, and the console's lines, which are all our own."""
    assert outcome.requests == 0
    assert (
        "wandb" not in outcome.printed.lower()
        and "tensorboard" not in outcome.printed.lower()
    )
    assert "resuming after step 4" in outcome.printed


class Fragile:
    """A writer that records its calls and fails at one of them."""

    label = "Fragile"

    def __init__(self, fails_at: str | None) -> None:
        self.calls: list[str] = []
        self._fails_at = fails_at

    def __getattr__(self, name: str):
        def method(*_: object) -> None:
            self.calls.append(name)
            if name == self._fails_at:
                raise OSError(28, "No space left on device")

        return method


@pytest.mark.parametrize("stage", ["start", "step", "flush", "finish", "close"])
def test_failed_writer_is_closed_and_never_called_again(stage: str) -> None:
    """Oracle: the calls of it and of a working one, and the sentence."""
    messages: list[str] = []
    broken = Fragile(stage)
    sound = Fragile(None)
    writers = Writers([broken, sound], messages.append, 0)
    order = ["start", "step", "step", "flush", "finish", "close"]
    for writers.last_step, name in zip((0, 1, 2, 2, 2, 2), order, strict=True):
        writers.call(methodcaller(name, step_of(1)))
    assert sound.calls == order
    assert broken.calls == [*order[: order.index(stage) + 1], "close"]
    step = {"start": 0, "step": 1}.get(stage, 2)
    assert messages == [
        f"Fragile failed after step {step} ([Errno 28] No space left on device) and is disabled; "
        "metrics.jsonl has every step"
    ]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_missing_package_is_reported_before_the_start(name: str, monkeypatch) -> None:
    """Oracle: the expected message, in an interpreter that finds none but its built-in modules."""
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [importlib.machinery.BuiltinImporter])
    with pytest.raises(ConfigError) as error:
        check_run_dir(MetricsConfig(writers=[name]))
    assert str(error.value) == (
        f"metrics.writers=[{name}] needs the package {name}, which is not installed; run pip "
        f"install -e '.[{name}]' or leave {name} out"
    )


def test_disabled_wandb_writes_nothing(tmp_path: Path) -> None:
    """Oracle: the files of a run without writers."""
    pytest.importorskip("wandb")
    with open_recorder(
        run_dir=tmp_path / "run", writers=["wandb"], wandb_mode=WandbMode.disabled
    ) as recorder:
        recorder.step(STEP)
        recorder.finish("done")
    assert not (tmp_path / "run" / "wandb").exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_writer_that_cannot_open_its_folder_is_reported_and_disabled(
    name: str, tmp_path: Path, capsys
) -> None:
    """Oracle: a file in the folder's place; one sentence, and a complete run without the writer."""
    pytest.importorskip(name)
    (tmp_path / name).write_text("no folder")
    resumed = ResumePoint(2, {}, "step-00000002")
    with recorder_with(tmp_path, [name], resumed) as recorder:
        recorder.step(step_of(3))
        recorder.finish("all steps done")
    label = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases"}[name]
    lines = capsys.readouterr().out.splitlines()
    (message,) = [line for line in lines if label in line]
    assert message.startswith(f"{label} failed after step 2 (")
    assert message.endswith("metrics.jsonl has every step")
    assert (tmp_path / "summary.md").exists()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
    assert (tmp_path / name).read_text() == "no folder"
