"""Facts from which a run must not resume: one message each, before any worker starts.

Damaged checkpoints and other names are in ``tests/checkpoint``, settings in ``tests/messages``.
"""

import json
import shutil
from pathlib import Path

import pytest

from fsdptoys.cli.train import _check_places
from fsdptoys.config.compose import compose_config
from fsdptoys.errors import ConfigError
from tests.harness.folders import seal
from tests.harness.short_runs import WORDS, train_run

NEWEST = Path("run/checkpoints/step-00000003")
MISSING = object()


def edit_state(key: str, value: object) -> None:
    """Set a fact of the newest checkpoint, or remove it, and update the checksums."""
    tree = json.loads((NEWEST / "state.json").read_text())
    *above, last = key.split(".")
    parent = tree
    for name in above:
        parent = parent[name]
    if value is MISSING:
        del parent[last]
    else:
        parent[last] = value
    (NEWEST / "state.json").write_text(json.dumps(tree))
    seal(NEWEST)


UNREADABLE: list[tuple[str, object, str]] = [
    ("config", MISSING, "config is missing"),
    (
        "config.optim.name",
        "\x1b]0;x",
        "config.optim.name is '\\x1b]0;x', not a line of at most 1000 printable characters",
    ),
    (
        "config.memory.optimizer_offload",
        0,
        "config.memory.optimizer_offload is 0, not true or false",
    ),
    ("data", None, "data is null, not a mapping"),
    (
        "data.samples",
        10**200,
        "data.samples is 100000000000000000...0000000000000000000, not an integer of at least 0",
    ),
    (
        "skipped_steps",
        True,
        "skipped_steps is true, not an integer from 0 to 999999999999999",
    ),
    ("spikes.losses", [1.0, None], "spikes.losses[1] is null, not a finite number"),
    (
        "metrics",
        {"metrics.jsonl": "0"},
        "metrics.metrics.jsonl is '0', not an integer from 0 to 9223372036854775807",
    ),
]
"""Fact, its value, and the problem."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train_run(folder)
    return folder


@pytest.fixture(autouse=True)
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the run in the current folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, "run")


@pytest.mark.parametrize(("key", "value", "problem"), UNREADABLE)
def test_checkpoint_with_invalid_facts_is_refused(
    key: str, value: object, problem: str
) -> None:
    """Oracle: the exact message; checksums agree, and no file changes."""
    edit_state(key, value)
    before = sorted(Path().rglob("*"))
    config = compose_config(
        [*WORDS, "metrics.run_dir=new", f"checkpoint.resume={NEWEST}"]
    )
    config.validate(1, "cpu")
    with pytest.raises(ConfigError) as caught:
        _check_places(config)
    assert str(caught.value) == (
        f"checkpoint.resume={NEWEST} is refused: step-00000003 in run/checkpoints holds facts "
        f"that this version does not read (state.json: {problem}); set "
        "checkpoint.resume=run/checkpoints/step-00000002"
    )
    assert sorted(Path().rglob("*")) == before
