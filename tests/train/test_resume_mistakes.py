"""Checkpoints from which a run must not resume: one message each, before any worker starts.

Settings with which a run cannot resume from sound checkpoints are in ``tests/messages``.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdptoys.cli.train import _check_places
from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.errors import ConfigError
from fsdptoys.train.run import Run
from fsdptoys.train.trainer import Trainer
from scripts.fuzz_edits import seal
from scripts.ranks import run_ranks

WORDS = ["experiment=null", "parallel=single", "train.seq_len=32", "train.steps=4", "metrics.console=none"]
CHECKPOINTS = Path("run/checkpoints")
NEWEST = CHECKPOINTS / "step-00000003"
OLDER = "set checkpoint.resume=run/checkpoints/step-00000002"
NO_MANIFEST = "is incomplete: it has no manifest.json"
MISSING = object()


def flip(name: str) -> None:
    """Change a byte of a file of the newest checkpoint."""
    content = bytearray((NEWEST / name).read_bytes())
    content[len(content) // 2] ^= 1
    (NEWEST / name).write_bytes(content)


def remove_manifests() -> None:
    for manifest in CHECKPOINTS.glob("*/manifest.json"):
        manifest.unlink()


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


DAMAGES: dict[str, tuple[Callable[[], object], str]] = {
    "no manifest": ((NEWEST / "manifest.json").unlink, NO_MANIFEST),
    "half a manifest": (
        lambda: (NEWEST / "manifest.json").write_text("{"),
        "is damaged: its manifest.json cannot be used (Expecting property name enclosed in double quotes: line 1 "
        "column 2 (char 1))",
    ),
    "a flipped bit in the manifest": (
        lambda: flip("manifest.json"),
        "is damaged: its manifest.json cannot be used (it differs from its canonical form)",
    ),
    "no index": ((NEWEST / "tensors.json").unlink, "is damaged: tensors.json is missing"),
    "a short file": (
        lambda: (NEWEST / "rank-00000.json").write_bytes(b"x"),
        "is damaged: rank-00000.json holds 1 bytes, and manifest.json says SIZE",
    ),
    "a flipped bit": (
        lambda: flip("state.json"),
        "is damaged: the SHA-256 of state.json is not the one that manifest.json says",
    ),
}

EDITS: list[tuple[str, object, str]] = [
    ("step", None, "is damaged: state.json is that of step None"),
    ("step", 3.0, "is damaged: state.json is that of step 3.0"),
    ("world_size", 2, "is damaged: state.json is that of 2 ranks, and manifest.json lists files of 1"),
]

UNREADABLE: list[tuple[str, object, str]] = [
    ("config", MISSING, "config is missing"),
    ("config.optim", [], "config.optim is [], not a mapping"),
    (
        "config.optim.name",
        "\x1b]0;x",
        "config.optim.name is '\\x1b]0;x', not a line of at most 1000 printable characters",
    ),
    ("config.train.steps", "3", "config.train.steps is '3', not an integer from 1 to 999999999999999"),
    ("config.memory.optimizer_offload", 0, "config.memory.optimizer_offload is 0, not true or false"),
    ("config.tune", "lora", "config.tune is 'lora', not a mapping of at most 1000"),
    ("data", None, "data is null, not a mapping"),
    ("data.samples", -1, "data.samples is -1, not an integer of at least 0"),
    (
        "data.samples",
        10**200,
        "data.samples is 100000000000000000...0000000000000000000, not an integer of at least 0",
    ),
    ("global_batch", MISSING, "global_batch is missing"),
    ("skipped_steps", True, "skipped_steps is true, not an integer from 0 to 999999999999999"),
    ("spikes.losses", [1.0, None], "spikes.losses[1] is null, not a finite number"),
    ("metrics", {"metrics.jsonl": "0"}, "metrics.metrics.jsonl is '0', not an integer from 0 to 9223372036854775807"),
]
"""Fact, its value, and the problem."""


def take_three_steps(config: Config) -> None:
    Run(Trainer(config)).run()


def train_run(folder: Path) -> None:
    """Train for three steps, with a checkpoint after each."""
    config = compose_config([*WORDS, f"metrics.run_dir={folder}", "checkpoint.every=1", "train.steps=3"])
    config.validate(1, "cpu")
    run_ranks(1, take_three_steps, config)


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


def refusal_of(typed: str) -> str:
    """Return the message; no file changes."""
    before = sorted(Path().rglob("*"))
    config = compose_config([*WORDS, *typed.split()])
    config.validate(1, "cpu")
    with pytest.raises(ConfigError) as caught:
        _check_places(config)
    assert sorted(Path().rglob("*")) == before
    return str(caught.value)


def refusal_of_newest() -> str:
    """Return what the message says about the newest checkpoint."""
    sentence = refusal_of(f"metrics.run_dir=new checkpoint.resume={NEWEST}")
    start, end = f"checkpoint.resume={NEWEST} is refused: step-00000003 in run/checkpoints ", f"; {OLDER}"
    assert sentence.startswith(start) and sentence.endswith(end)
    return sentence.removeprefix(start).removesuffix(end)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_refused(damage: str) -> None:
    """Oracle: the exact message."""
    change, problem = DAMAGES[damage]
    size = (NEWEST / "rank-00000.json").stat().st_size
    change()
    assert refusal_of_newest() == problem.replace("SIZE", str(size))


@pytest.mark.parametrize(("key", "value", "problem"), EDITS)
def test_checkpoint_with_other_facts_than_its_manifest_is_refused(key: str, value: object, problem: str) -> None:
    """Oracle: the exact message; checksums agree."""
    edit_state(key, value)
    assert refusal_of_newest() == problem


@pytest.mark.parametrize(("key", "value", "problem"), UNREADABLE)
def test_checkpoint_with_invalid_facts_is_refused(key: str, value: object, problem: str) -> None:
    """Oracle: the exact message; checksums agree."""
    edit_state(key, value)
    assert refusal_of_newest() == f"holds facts that this version does not read (state.json: {problem})"


def test_folder_without_complete_checkpoints_is_refused() -> None:
    """Oracle: the exact message, with the reason for each checkpoint."""
    remove_manifests()
    reasons = "; ".join(f"step-0000000{step} {NO_MANIFEST}" for step in (3, 2, 1))
    assert refusal_of("metrics.run_dir=run checkpoint.resume=must") == (
        f"checkpoint.resume=must finds no complete checkpoint in run/checkpoints ({reasons}); set "
        "checkpoint.resume=auto to start from scratch, or checkpoint.folder or metrics.run_dir to where they are"
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "step-00000007",
            "is refused: step-00000007 in run/checkpoints is damaged: its manifest.json is that of 'step-00000003'; "
            f"{OLDER}",
        ),
        (
            "saved",
            "holds a checkpoint under another name than its own, step-…; give it the name that its manifest.json says",
        ),
    ],
)
def test_renamed_checkpoint_is_refused(name: str, sentence: str) -> None:
    """Oracle: the exact message."""
    NEWEST.rename(CHECKPOINTS / name)
    typed = f"checkpoint.resume=run/checkpoints/{name}"
    assert refusal_of(f"metrics.run_dir=new {typed}") == f"{typed} {sentence}"


def test_run_with_checkpoints_starts_from_no_other_run() -> None:
    """Oracle: the exact message."""
    shutil.copytree("run", "other")
    assert refusal_of("metrics.run_dir=run checkpoint.resume=other") == (
        "checkpoint.resume=other starts a run in run/checkpoints, which already holds step-00000003 of another one; "
        "set checkpoint.resume=auto to resume from that, or another folder"
    )


@pytest.mark.parametrize(
    "typed",
    [
        "metrics.run_dir=run checkpoint.resume=auto",
        "metrics.run_dir=run checkpoint.resume=must train.steps=9",
        "metrics.run_dir=run checkpoint.resume=run/checkpoints/step-00000003",
        "metrics.run_dir=new checkpoint.resume=run/checkpoints/step-00000002",
        "metrics.run_dir=new checkpoint.resume=auto",
        "metrics.run_dir=new",
    ],
)
def test_valid_resume_settings_are_accepted(typed: str) -> None:
    """Oracle: no error; the mistakes are changes of these arguments."""
    config = compose_config([*WORDS, *typed.split()])
    config.validate(1, "cpu")
    _check_places(config)
