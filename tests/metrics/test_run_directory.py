"""The run directory, and messages about its problems."""

import json
import os
import platform
import resource
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdptoys.device import Device
from fsdptoys.errors import ConfigError
from fsdptoys.metrics import MetricsConfig, RunDirectory, check_run_dir, environment
from fsdptoys.metrics.config import RUN_FILES
from fsdptoys.metrics.run_environment import checkout_commit, hardware_line
from tests.harness.recording import STEP

TREE = {
    "train": {"steps": 2, "sample_prompt": "def ", "seed": None},
    "model": {"name": "l\u00e4ma", "dims": [1, 2]},
}


@pytest.fixture(autouse=True)
def current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def open_run(run_dir: str | None = None, title: str = "tiny") -> RunDirectory:
    directory = RunDirectory(
        MetricsConfig(run_dir=run_dir), title, TREE, {"world_size": 1}
    )
    directory.close()
    return directory


def append(directory: RunDirectory, step: int = 1) -> list[str]:
    return directory.append("metrics.jsonl", replace(STEP, step=step).to_json())


def test_config_is_written_after_the_files_read_with_it(monkeypatch):
    """Oracle: existing files at the time the settings are written, which make the folder a run
    directory."""
    listings = []
    write = RunDirectory.write

    def watched(self: RunDirectory, name: str, text: str) -> None:
        listings.append(
            (
                name,
                sorted(
                    path.name
                    for path in self.path.iterdir()
                    if not path.name.startswith(".")
                ),
            )
        )
        write(self, name, text)

    monkeypatch.setattr(RunDirectory, "write", watched)
    open_run("run").close()
    assert dict(listings)["config.yaml"] == ["environment.json", "metrics.jsonl"]


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("Llama 2/tiny: fsdp2", "-Llama-2-tiny-fsdp2"),
        ("", "-run"),
        ("///", "-run"),
        ("\u6a21\u578b", "-run"),
        ("x" * 500, "-" + "x" * 80),
    ],
)
def test_default_run_directories_are_unique_for_any_title(title, name):
    """Oracle: one folder per run, although all start within seconds under one title."""
    paths = [open_run(None, title).path for _ in range(4)]
    assert len(set(paths)) == 4
    for path in paths:
        assert path.parent == Path("runs") and name in path.name
        assert (path / "metrics.jsonl").exists()


def test_tilde_expands_to_the_home_directory(tmp_path, monkeypatch):
    """Oracle: the folder below ``HOME``."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_run("~/run").path == tmp_path / "home" / "run"
    assert not Path("~").exists()


@pytest.mark.parametrize("name", list(RUN_FILES))
def test_new_run_never_overwrites_existing_files(name):
    """Oracle: the expected message, before the run and at its start, and the unchanged file."""
    Path("taken").mkdir()
    Path("taken", name).write_text("mine")
    for attempt in (
        lambda: check_run_dir(MetricsConfig(run_dir="taken")),
        lambda: open_run("taken"),
    ):
        with pytest.raises(ConfigError) as error:
            attempt()
        assert str(error.value) == (
            f"metrics.run_dir=taken already contains {name}, which a run would overwrite; set "
            "checkpoint.resume=auto to continue it, or metrics.run_dir to a new folder (null for "
            "one named by time and title)"
        )
    assert Path("taken", name).read_text() == "mine"


def test_second_of_two_concurrent_runs_in_one_folder_is_rejected(monkeypatch):
    """Oracle: the expected message, with the earlier check passed by both as in a race."""
    monkeypatch.setattr(
        "fsdptoys.metrics.run_directory.check_run_dir", lambda *arguments: None
    )
    open_run("run")
    with pytest.raises(
        ConfigError,
        match=r"^metrics\.run_dir=run already contains metrics\.jsonl, which",
    ):
        open_run("run")


@pytest.mark.parametrize("run_dir", ["file", "file/below", "link"])
def test_non_folder_path_is_rejected(run_dir):
    """Oracle: the message names the obstacle; the same for a file, a path through it, and a dead
    link."""
    Path("file").write_text("")
    Path("link").symlink_to("nowhere")
    message = (
        rf"^metrics\.run_dir={run_dir} needs a folder at .*, which is not a folder; "
    )
    with pytest.raises(ConfigError, match=message):
        check_run_dir(MetricsConfig(run_dir=run_dir))


@pytest.mark.parametrize(
    ("run_dir", "key"), [("locked/a/b", "locked/a/b"), (None, "null")]
)
def test_unwritable_folder_is_rejected(run_dir, key, tmp_path, monkeypatch):
    """Oracle: the expected message; the system's answer is set by hand, since root may write
    anywhere."""
    Path("locked").mkdir()
    monkeypatch.setattr(
        os,
        "access",
        lambda path, mode: Path(path).resolve() not in (tmp_path, tmp_path / "locked"),
    )
    with pytest.raises(
        ConfigError, match=rf"^metrics\.run_dir={key} needs write access to .*; "
    ):
        check_run_dir(MetricsConfig(run_dir=run_dir))


@pytest.mark.parametrize("run_dir", [None, "new/folder", "../beside", "."])
def test_usable_folders_pass_the_check_without_being_created(run_dir, tmp_path):
    """Oracle: no sentence, and an empty current directory."""
    check_run_dir(MetricsConfig(run_dir=run_dir))
    assert not any(tmp_path.iterdir())


def test_environment_has_versions_and_hardware_but_no_host_name(monkeypatch):
    """Oracle: the running interpreter's own answers; JSON takes it; the host's name is nowhere."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    facts = json.loads(
        json.dumps(
            environment(Device("cpu"), 4, ["fsdptoys", "train", "data.path=a b"])
        )
    )
    assert facts["command"] == "fsdptoys train 'data.path=a b'"
    expected = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }
    expected |= {"cudnn": torch.backends.cudnn.version()}
    assert {name: facts["versions"][name] for name in expected} == expected
    assert facts["world_size"] == 4
    assert facts["machine"]["cpu_cores"] == os.cpu_count()
    assert facts["environment_variables"]["OMP_NUM_THREADS"] == "3"
    assert facts["environment_variables"]["PYTORCH_ALLOC_CONF"] is None
    assert facts["started_at"].endswith("+00:00")
    assert "node" not in facts["machine"]
    assert hardware_line(facts).startswith("4 ranks on ")
    facts["device"]["type"] = "cuda"
    line = hardware_line(facts | {"attention_backend": "cudnn"})
    assert line.endswith(f"torch {torch.__version__}, attention by cudnn")


def test_commit_is_that_of_the_checkout(tmp_path, monkeypatch):
    """Oracle: ``git rev-parse`` in a checkout made here; outside its root, and without git, there
    is none."""
    root = tmp_path / "checkout"
    root.mkdir()

    def git(*argv: str) -> str:
        identity = [
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "-c",
            "commit.gpgsign=false",
        ]
        child = subprocess.run(
            ["git", "-C", str(root), *identity, *argv],
            capture_output=True,
            text=True,
            check=True,
        )
        return child.stdout.strip()

    try:
        git("init")
    except FileNotFoundError:
        pytest.skip("needs git")
    assert checkout_commit(root) is None, "there is no commit yet"
    (root / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    commit = git("rev-parse", "HEAD")
    assert checkout_commit(root) == commit
    (root / "file").write_text("2")
    assert checkout_commit(root) == f"{commit}-dirty"
    (root / "installed").mkdir()
    assert checkout_commit(root / "installed") is None
    monkeypatch.setenv("PATH", "")
    assert checkout_commit(root) is None


@pytest.mark.parametrize("there_is_room", [True, False])
def test_queued_steps_are_written_completely_once_there_is_space(
    there_is_room: bool, tmp_path: Path
) -> None:
    """Oracle: the file, with a limit on its size in the middle of the second line, which may be
    lifted; a full disk is reported once."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def make_room() -> bool:
        if there_is_room:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return there_is_room

    config = MetricsConfig(run_dir=str(tmp_path / "run"))
    directory = RunDirectory(config, "tiny", {}, {}, make_room=make_room)
    append(directory, 1)
    first = (tmp_path / "run" / "metrics.jsonl").read_text()
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(first) + 20, before[1]))
    try:
        message = f"steps wait in memory until {directory.path} has free space (File too large)"
        assert append(directory, 2) == ([] if there_is_room else [message])
        assert append(directory, 3) == []
        if not there_is_room:
            assert (tmp_path / "run" / "metrics.jsonl").read_text() == first
            with pytest.raises(
                ConfigError, match=r"run cannot be written \(File too large\); set"
            ):
                directory.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    directory.flush()
    directory.close()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert lines == first + "".join(
        replace(STEP, step=step).to_json() + "\n" for step in (2, 3)
    )


def test_each_step_is_on_disk_before_the_next():
    """Oracle: the file, read while the run still holds it open."""
    directory = RunDirectory(MetricsConfig(run_dir="run"), "tiny", TREE, {})
    for number in (1, 2):
        append(directory, number)
        lines = Path("run/metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(
            range(1, number + 1)
        )
    directory.close()
