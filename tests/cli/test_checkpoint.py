"""``fsdptoys checkpoint``: the list of a run's checkpoints, and the contents of one."""

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from fsdptoys.checkpoint import CheckpointConfig, Checkpointer
from fsdptoys.checkpoint import inspect as inspect_module
from fsdptoys.checkpoint.inspect import Condition, Description, describe
from fsdptoys.checkpoint.storage import LocalStorage
from fsdptoys.cli.main import main
from fsdptoys.parallel import FSDP2Config
from fsdptoys.train.resume import FACTS
from fsdptoys.train.run import train
from tests.harness.folders import seal
from tests.harness.ranks import run_ranks
from tests.harness.tiny import make_config

NAMES = [f"step-{step:08d}" for step in (3, 2, 1)]
NEWEST = NAMES[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps on two ranks, with a checkpoint of each."""
    config = make_config(FSDP2Config(), 2, steps=3, grad_accum=1, seq_len=8)
    config.checkpoint = CheckpointConfig(every=1)
    run_dir = tmp_path_factory.mktemp("runs") / "mine"
    config.metrics = dataclasses.replace(config.metrics, run_dir=str(run_dir))
    run_ranks(2, lambda: train(config) and None)
    return run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "mine"))


def listed(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> Any:
    assert main(["checkpoint", *argv, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def flip_byte(folder: Path) -> None:
    path = folder / "tensors-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def edit_state(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change facts, with checksums that hold."""
    tree = json.loads((folder / "state.json").read_text())
    edit(tree)
    (folder / "state.json").write_text(json.dumps(tree))
    seal(folder)


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a flipped byte": (
        flip_byte,
        "damaged",
        r"the SHA-256 of tensors-00001\.safetensors",
    ),
    "a missing file": (
        lambda folder: (folder / "rank-00001.json").unlink(),
        "damaged",
        "rank-00001.json is missing",
    ),
    "no manifest": (
        lambda folder: (folder / "manifest.json").unlink(),
        "incomplete",
        "it has no manifest.json",
    ),
    "facts of another version": (
        lambda folder: edit_state(folder, lambda tree: tree.update(data=3)),
        "damaged",
        "holds facts that this version does not read",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_list_names_the_damage_and_the_checkpoint_that_auto_resumes_from(
    damage: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the checkpoint that a run with ``checkpoint.resume=auto`` loads."""
    change, condition, problem = DAMAGES[damage]
    folder = run_dir / "checkpoints"
    change(folder / NEWEST)
    listing = listed(capsys, "ls", str(run_dir), status=int(condition == "damaged"))
    assert [checkpoint["name"] for checkpoint in listing["checkpoints"]] == NAMES
    newest = listing["checkpoints"][0]
    assert newest["condition"] == condition and re.search(problem, newest["problem"])
    assert not newest["checksums_hold"]
    config = CheckpointConfig(resume="auto")
    resumed = Checkpointer(
        config, str(folder), None, message=lambda text: None, schema=FACTS
    ).resume()
    assert resumed is not None and listing["auto"] == resumed.name == NAMES[1]
    main(["checkpoint", "ls", str(run_dir)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [
        ["step", "state"],
        ["3", condition],
    ]
    assert lines[3].split()[0] == "2" and lines[3].endswith("hold       auto")
    assert lines[-1] == f"checkpoint.resume=auto resumes from {NAMES[1]}"
    assert any(
        line.startswith(f"{NEWEST} ") and re.search(problem, line) for line in lines
    )


def test_list_has_the_numbers_of_the_files(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: sizes and times of the files, and the index; folders that are never loaded are
    named."""
    folder = run_dir / "checkpoints"
    (folder / f".{NEWEST}.partial").mkdir()
    (folder / "step-00000002.damaged-1").mkdir()
    listing = listed(capsys, "ls", str(folder))
    assert listing["never_loaded"] == [f".{NEWEST}.partial", "step-00000002.damaged-1"]
    for checkpoint in listing["checkpoints"]:
        checkpoint_folder = folder / checkpoint["name"]
        sizes = [
            path.stat().st_size
            for path in checkpoint_folder.iterdir()
            if path.name != "manifest.json"
        ]
        assert (checkpoint["bytes"], checkpoint["saved_at"]) == (
            sum(sizes),
            (checkpoint_folder / "manifest.json").stat().st_mtime,
        )
        assert checkpoint["tensors"] == len(
            json.loads((checkpoint_folder / "tensors.json").read_text())["tensors"]
        )
        assert (
            checkpoint["layout"],
            checkpoint["ranks"],
            checkpoint["checksums_hold"],
        ) == (
            "fsdp2, 2 ranks",
            2,
            True,
        )
    alone = listed(capsys, "ls", str(folder / NAMES[1]))
    assert alone["checkpoints"] == [listing["checkpoints"][1]] and alone["auto"] is None


def test_large_checkpoints_are_verified_only_if_asked(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a flipped byte, which sizes do not show."""
    flip_byte(run_dir / "checkpoints" / NEWEST)
    monkeypatch.setattr(inspect_module, "CHEAP_BYTES", 10)
    assert main(["checkpoint", "ls", str(run_dir)]) == 0
    text = capsys.readouterr().out
    assert text.count("not read") == 4 and "--verify reads " in text
    assert (
        text.splitlines()[-1]
        == f"checkpoint.resume=auto resumes from {NEWEST}, if its checksums hold"
    )
    assert listed(capsys, "ls", str(run_dir), "--verify", status=1)["auto"] == NAMES[1]
    assert main(["checkpoint", "show", str(run_dir)]) == 0
    assert "checksums not read" in capsys.readouterr().out


def test_show_prints_tensors_states_and_totals(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the index, and AdamW's two moments and counter of every parameter."""
    index = json.loads((run_dir / "checkpoints" / NEWEST / "tensors.json").read_text())[
        "tensors"
    ]
    params = {
        name: tensor for name, tensor in index.items() if name.startswith("model.")
    }
    elements = sum(math.prod(tensor["shape"]) for tensor in params.values())
    assert main(["checkpoint", "show", str(run_dir)]) == 0
    text = capsys.readouterr().out
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines()[1:9])
    assert (
        facts["layout"] == "fsdp2, 2 ranks"
        and facts["data"] == "12 sequences seen, 4 a step"
    )
    assert facts["model"] == "tiny, optimizer adamw" and facts[
        "random states"
    ].startswith("of 2 ranks, ")
    rows = [line.split() for line in text.splitlines() if line.startswith("model.")]
    assert [row[0] for row in rows] == sorted(params)
    weight = params["model.layers.0.mlp.up_proj.weight"]
    assert ["model.layers.0.mlp.up_proj.weight", "F32", "50", "×", "36", "2"] in [
        row[:6] for row in rows
    ]
    assert weight["shape"] == [50, 36] and len(weight["chunks"]) == 2
    totals = {
        line.rpartition(f"{len(params)} tensors")[0].strip(): line
        for line in text.splitlines()[-5:]
    }
    for label in (
        "parameters",
        "optimizer state exp_avg",
        "optimizer state exp_avg_sq",
    ):
        assert re.search(
            rf"{len(params)} tensors +{elements:,} elements", totals[label]
        )
    assert re.search(rf"{len(params)} elements", totals["optimizer state step"])
    contents = listed(
        capsys, "show", str(run_dir / "checkpoints" / NAMES[2]), "optim.*.exp_avg"
    )
    assert contents["step"] == 1 and contents["state"]["data"]["samples"] == 4
    assert set(contents["contents"]) == {
        f"optim.{name.removeprefix('model.')}.exp_avg" for name in params
    }
    assert contents["contents"]["optim.norm.weight.exp_avg"] == {
        "dtype": "F32",
        "shape": [36],
        "bytes": 144,
        "shards": 2,
    }


def test_show_refuses_a_run_without_a_complete_checkpoint(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the reason of each, in one sentence; the list says that a run starts from scratch."""
    for name in NAMES[:2]:
        (run_dir / "checkpoints" / name / "manifest.json").unlink()
    flip_byte(run_dir / "checkpoints" / NAMES[2])
    assert main(["checkpoint", "show", str(run_dir)]) == 2
    message = capsys.readouterr().err
    assert (
        message.count("is incomplete: it has no manifest.json; ") == 2
        and f"{NAMES[2]} is damaged: the SHA-256" in message
    )
    assert main(["checkpoint", "ls", str(run_dir)]) == 1
    assert (
        "checkpoint.resume=auto finds no complete checkpoint" in capsys.readouterr().out
    )


def test_names_of_a_hostile_checkpoint_control_no_terminal(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the escape sequence as text, on one line."""
    folder = run_dir / "checkpoints" / NEWEST
    edit_state(
        folder, lambda tree: tree["config"]["parallel"].update(name="a\x1b[2J\nb")
    )
    (run_dir / "checkpoints" / "step-00000001.\x1b[2J").mkdir()
    for command in ("ls", "show"):
        assert main(["checkpoint", command, str(run_dir)]) == 0
        text = capsys.readouterr().out
        assert "\x1b" not in text and "a\\x1b[2J b, 2 ranks" in text


def test_checkpoints_at_a_url_are_listed_like_local_ones(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the list of the local folder; checksums at a URL are read only if asked."""
    local = listed(capsys, "ls", str(run_dir / "checkpoints"))
    files = fsspec.filesystem("memory")
    files.put(str(run_dir / "checkpoints"), "/listed", recursive=True)
    remote = listed(capsys, "ls", "memory://listed")
    assert [checkpoint["checksums_hold"] for checkpoint in remote["checkpoints"]] == [
        None
    ] * 3
    remote = listed(capsys, "ls", "memory://listed", "--verify")
    for local_facts, remote_facts in zip(
        local["checkpoints"], remote["checkpoints"], strict=True
    ):
        assert (
            remote_facts.pop("saved_at") > 0
            and local_facts.pop("saved_at") > 0
            and local_facts == remote_facts
        )
    assert remote["auto"] == local["auto"] == NEWEST
    files.rm("/listed", recursive=True)


@pytest.mark.parametrize(
    ("size", "expected"), [(2, "fsdp2, 4 ranks in 2 copies"), (-1, "fsdp2, 4 ranks")]
)
def test_layout_counts_the_copies_of_hybrid_sharding(size: int, expected: str) -> None:
    """Oracle: four ranks in shards of two are two copies."""
    config = {"parallel": {"name": "fsdp2"}, "mesh": {"fsdp_size": size}}
    assert (
        Description(NEWEST, facts={"config": config, "world_size": 4}).layout
        == expected
    )


def test_a_folder_that_the_system_refuses_to_read_stops_auto(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the permission error of one file; root may read everything, so reading raises it."""
    reading = LocalStorage.reading

    def refuse(storage: LocalStorage, path: str) -> Any:
        if path == f"{NEWEST}/state.json":
            raise PermissionError(13, "Permission denied")
        return reading(storage, path)

    monkeypatch.setattr(LocalStorage, "reading", refuse)
    monkeypatch.setattr("fsdptoys.checkpoint.manifest.RETRY_PAUSES_SECONDS", ())
    assert (
        describe(LocalStorage(str(run_dir / "checkpoints")), NEWEST).condition
        is Condition.unreadable
    )
    assert main(["checkpoint", "ls", str(run_dir)]) == 0
    text = capsys.readouterr().out
    assert f"{NEWEST} cannot be read (state.json: Permission denied)" in text
    assert f"checkpoint.resume=auto stops at {NEWEST}" in text
    assert listed(capsys, "ls", str(run_dir))["auto"] is None
