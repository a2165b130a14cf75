"""Paths, folders and environments that a run cannot use get one sentence before a worker starts."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fsdptoys.cli.main import main
from fsdptoys.config.compose import compose_config
from fsdptoys.errors import ConfigError
from fsdptoys.launch.worker import WorkerRequest, make_launch_folder
from fsdptoys.metrics import check_run_dir
from tests.harness.levels import extended
from tests.harness.processes import as_other_user

ROOT = Path(__file__).parents[2]

NOT_UTF_8 = os.fsdecode(b"bad\xff")


@pytest.mark.parametrize(
    ("text", "escaped", "fault"),
    [
        (
            NOT_UTF_8,
            r"bad\\udcff",
            "is not valid UTF-8, as a run's config.yaml is; use another name",
        ),
        (
            "${oc.env:ODD}",
            r"bad\\udcff",
            "is not valid UTF-8, as a run's config.yaml is; use another name",
        ),
        (
            "a\0b",
            r"[^\n\0]*",
            "holds a NUL character, which no path may have; leave it out",
        ),
    ],
    ids=["typed", "variable", "NUL"],
)
@pytest.mark.parametrize(
    "line",
    ["metrics.run_dir=TEXT", "data=text data.files=[TEXT]"],
)
def test_text_that_is_no_name_is_rejected(
    line: str, text: str, escaped: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: one sentence that names the key and shows the byte escaped."""
    monkeypatch.setenv("ODD", NOT_UTF_8)
    key = line.split()[-1].partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{key}=\[?{escaped}\]? {fault}$"):
        compose_config(line.replace("TEXT", text).split(" "))


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        (
            "a" * 256,
            "has a name of 256 bytes, and the file system takes 255 at most; use a shorter one",
        ),
        (
            "/x" * 2500,
            "is a path of 5000 bytes, and a run directory may have 3895 at most; use a shorter one",
        ),
        (
            "loop/x",
            (
                "cannot be used (Too many levels of symbolic links); set metrics.run_dir to "
                "another folder"
            ),
        ),
    ],
)
def test_run_directory_with_an_impossible_path_is_rejected(
    path: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the expected message; 255 and 4096 are Linux's own limits."""
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(ConfigError) as caught:
        check_run_dir(compose_config([f"metrics.run_dir='{path}'"]).metrics)
    assert str(caught.value) == f"metrics.run_dir={path} {sentence}"


@pytest.mark.parametrize("below", ["run", "run/new"])
def test_run_directory_below_an_inaccessible_folder_is_rejected(
    below: str, tmp_path: Path
) -> None:
    """Oracle: the expected message, with the system's reason."""
    closed = tmp_path / "closed"
    (closed / "run").mkdir(parents=True)
    config = compose_config([f"metrics.run_dir={closed / below}"]).metrics
    closed.chmod(0)
    with as_other_user(), pytest.raises(ConfigError) as caught:
        check_run_dir(config)
    closed.chmod(0o700)
    assert str(caught.value) == (
        f"metrics.run_dir={closed / below} cannot be used (Permission denied); set "
        "metrics.run_dir to another folder"
    )


@pytest.mark.launcher
def test_deleted_current_folder_is_reported_in_one_sentence(tmp_path: Path) -> None:
    """Oracle: full stderr of the real command; help needs no folder."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    folder = f'"{tmp_path}/gone"'
    gone = [
        "sh",
        "-c",
        f'mkdir {folder} && cd {folder} && rmdir {folder} && exec "$0" "$@"',
    ]
    process = subprocess.run(
        [*gone, sys.executable, "-m", "fsdptoys", "train"],
        env=env,
        capture_output=True,
        text=True,
    )
    assert (process.returncode, process.stdout, process.stderr) == (
        2,
        "",
        (
            "fsdptoys: the current folder cannot be used (No such file or directory), as after it "
            "was deleted; change to another one\n"
        ),
    )
    assert (
        subprocess.run(
            [*gone, sys.executable, "-m", "fsdptoys", "train", "--help"], env=env
        ).returncode
        == 0
    )


def fail_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command that fails so."""

    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr("fsdptoys.cli.models.models_command", fail)
    return main(["models"])


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            OSError(errno.EMFILE, "Too many open files", "a\x1bb"),
            "the system refuses for a\\x1bb: Too many open files; raise the limit with ulimit -n",
        ),
        (ConfigError("x=a\nb\x1b is wrong"), "x=a\\nb\\x1b is wrong"),
        (
            OSError(errno.ENAMETOOLONG, "File name too long", 400 * "a"),
            f"the system refuses for {299 * 'a'}…: File name too long; use a shorter path",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "the system refuses: No space left on device; make room on that disk",
        ),
        (
            MemoryError("Unable to allocate 1.00 PiB"),
            "host memory ran out (Unable to allocate 1.00 PiB); end other programs, or use a "
            "machine with more",
        ),
        (
            FileNotFoundError(
                errno.ENOENT, "No usable temporary directory found in ['/tmp']"
            ),
            "No usable temporary directory found in ['/tmp']; set TMPDIR to a folder that can be "
            "written",
        ),
        (
            ValueError("\nInvalid log settings: odd, must be a comma"),
            "PyTorch refuses a variable of the environment (Invalid log settings: odd, must be a "
            "comma); unset TORCH_DISTRIBUTED_DEBUG, TORCH_LOGS or LOGLEVEL",
        ),
        (
            RuntimeError("Could not determine home directory."),
            "the home folder is unknown, so ~ cannot be expanded; set HOME, or write the path "
            "without ~",
        ),
    ],
)
def test_system_error_is_reported_in_one_sentence(
    error: Exception,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Oracle: the message, wherever in a command the error comes from; status 1 for a state that
    may pass, else 2."""
    passes = isinstance(error, (OSError, MemoryError)) and not isinstance(
        error, FileNotFoundError
    )
    assert fail_with(error, monkeypatch) == (1 if passes else 2)
    assert capsys.readouterr() == ("", f"fsdptoys: {sentence}\n")


def test_unwritable_temporary_folder_is_reported_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the messages, for no folder at all and for one on a full disk, of which nothing is
    left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(ConfigError) as caught:
        make_launch_folder(None)
    fix = "set TMPDIR to a folder that can be written, on a disk with room"
    assert str(caught.value) == (
        f"the launcher cannot write its temporary folder (No such file or directory); {fix}"
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError) as caught:
        make_launch_folder(WorkerRequest(None, None, 1, 1))
    assert (
        str(caught.value)
        == f"the launcher cannot write its temporary folder (No space left on device); {fix}"
    )
    assert list(tmp_path.iterdir()) == []


MESSAGE = "libhccl.so: cannot open shared object file: No such file or directory"
"""Of torch_npu 2.13.0 on a machine without CANN."""


@pytest.fixture
def broken_backend(tmp_path: Path) -> Path:
    """A folder with a distribution like torch_npu's. Its entry point fails as it does without
    CANN."""
    (tmp_path / "torch_npu.py").write_text(f"raise ImportError({MESSAGE!r})\n")
    described = tmp_path / "torch_npu-2.13.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n"
    )
    (described / "entry_points.txt").write_text(
        "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("line", "autoload", "status"),
    [
        ("models", "1", 2),
        extended("train --help", "1", 0),
        extended("train launch.device=cpu --cfg job", "0", 0),
    ],
)
def test_backend_that_fails_to_load_is_reported_in_one_sentence_where_it_is_needed(
    line: str, autoload: str, status: int, broken_backend: Path
) -> None:
    """Oracle: PyTorch's error with torch_npu's reason; help needs no PyTorch, and the suggested
    variable helps."""
    process = subprocess.run(
        [sys.executable, "-m", "fsdptoys", *line.split()],
        cwd=broken_backend,
        env=os.environ
        | {
            "PYTHONPATH": f"{broken_backend}:{ROOT}",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload,
        },
        capture_output=True,
        text=True,
    )
    assert (process.returncode, process.stdout == "") == (status, status == 2)
    assert status == 0 or process.stderr == (
        "fsdptoys: PyTorch cannot be imported, since the installed torch_npu cannot be loaded "
        f"[{MESSAGE}]; install what it needs (torch_npu: CANN, whose set_env.sh is sourced), or "
        "set TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment to do without it\n"
    )
