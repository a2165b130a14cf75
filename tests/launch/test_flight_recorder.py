"""Flight recordings of NCCL and HCCL collectives: location and retention."""

import os
from pathlib import Path

import pytest

from fsdptoys.launch.failures import FILE_NAMES, HCCL_FILE_NAME, keep_recordings, name_recordings

NCCL = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
HCCL = {"TORCH_HCCL_DUMP_ON_TIMEOUT": "1"}


@pytest.mark.parametrize(
    "present, name",
    [(NCCL, FILE_NAMES[1]), (NCCL | {"TORCH_FR_BUFFER_SIZE": "2000"}, FILE_NAMES[0]), (HCCL, HCCL_FILE_NAME)],
)
def test_recordings_are_kept_in_the_run_directory(
    present: dict[str, str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: files written under the name that the environment gives are found in the run directory."""
    with monkeypatch.context() as environment:
        for variable, value in {**present, name: ""}.items():
            environment.setenv(variable, value)
        environment.delenv(name)
        launch, run = tmp_path / "launch", tmp_path / "run"
        launch.mkdir()
        run.mkdir()
        name_recordings(launch)
        assert keep_recordings(launch, run) is None
        prefix = os.environ[name]
        Path(f"{prefix}3").write_text("recorded")
        (tmp_path / "precious").write_text("precious")
        (run / "flight_recorder").mkdir()
        (run / "flight_recorder" / "rank_3").symlink_to(tmp_path / "precious")
        message = keep_recordings(launch, run)
    assert (run / "flight_recorder" / "rank_3").read_text() == "recorded"
    assert (tmp_path / "precious").read_text() == "precious"
    assert message is not None and str(run / "flight_recorder") in message
    assert ("torchfrtrace" in message) == (present != HCCL)


def test_user_defined_location_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the environment."""
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    monkeypatch.setenv(FILE_NAMES[1], "/elsewhere/rank_")
    name_recordings(tmp_path)
    assert [os.environ.get(name) for name in FILE_NAMES] == [None, "/elsewhere/rank_"]
