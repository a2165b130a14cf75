"""Checkpoints and folders from which a run must not resume: one message each, before any worker starts."""

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
ELSEWHERE = "set checkpoint.folder to a place that can be"
OLDER = "set checkpoint.resume=run/checkpoints/step-00000002"
IS_REFUSED = "checkpoint.resume=run/checkpoints/step-00000003 is refused: step-00000003 in run/checkpoints is"
NOTHING_THERE = (
    "holds no checkpoint; set it to never, auto or must, or to the folder of a checkpoint, of several, or of a run"
)


def flip(name: str) -> Callable[[], None]:
    def damage() -> None:
        content = bytearray((NEWEST / name).read_bytes())
        content[len(content) // 2] ^= 1
        (NEWEST / name).write_bytes(content)

    return damage


def drop_manifests() -> None:
    for manifest in CHECKPOINTS.glob("*/manifest.json"):
        manifest.unlink()


def edit(file: str, key: str, *value: object) -> Callable[[], None]:
    """Set a value of a checkpoint, or remove its key, and update the checksums."""

    def damage() -> None:
        tree = json.loads((NEWEST / file).read_text())
        *above, last = key.split(".")
        parent = tree
        for name in above:
            parent = parent[name]
        if value:
            parent[last] = value[0]
        else:
            del parent[last]
        (NEWEST / file).write_text(json.dumps(tree))
        seal(NEWEST)

    return damage


def nothing() -> None:
    pass


MISTAKES: list[tuple[str, Callable[[], object], str]] = [
    (
        "metrics.run_dir=new checkpoint.resume=must",
        nothing,
        "checkpoint.resume=must finds no complete checkpoint in new/checkpoints; set checkpoint.resume=auto to start "
        "from scratch, or checkpoint.folder or metrics.run_dir to where they are",
    ),
    (
        "metrics.run_dir=run checkpoint.resume=must",
        drop_manifests,
        "checkpoint.resume=must finds no complete checkpoint in run/checkpoints (step-00000003 is incomplete: it has "
        "no manifest.json; step-00000002 is incomplete: it has no manifest.json; step-00000001 is incomplete: it has "
        "no manifest.json); set checkpoint.resume=auto to start from scratch, or checkpoint.folder or "
        "metrics.run_dir to where they are",
    ),
    ("metrics.run_dir=new checkpoint.resume=nowhere", nothing, f"checkpoint.resume=nowhere {NOTHING_THERE}"),
    (
        "metrics.run_dir=new checkpoint.resume=run/checkpoints/step-00000009",
        nothing,
        f"checkpoint.resume=run/checkpoints/step-00000009 {NOTHING_THERE}",
    ),
    (
        "metrics.run_dir=new checkpoint.resume=run/config.yaml",
        nothing,
        f"checkpoint.resume=run/config.yaml {NOTHING_THERE}",
    ),
    (
        "metrics.run_dir=new checkpoint.resume=run/checkpoints/step-00000003",
        (NEWEST / "manifest.json").unlink,
        f"{IS_REFUSED} incomplete: it has no manifest.json; {OLDER}",
    ),
    (
        "metrics.run_dir=new checkpoint.resume=run/checkpoints/step-00000003",
        lambda: (NEWEST / "manifest.json").write_text("{"),
        f"{IS_REFUSED} damaged: its manifest.json cannot be used (Expecting property name enclosed in double quotes: "
        f"line 1 column 2 (char 1)); {OLDER}",
    ),
    (
        "metrics.run_dir=new checkpoint.resume=run/checkpoints/step-00000003",
        flip("manifest.json"),
        f"{IS_REFUSED} damaged: its manifest.json cannot be used (it differs from its canonical form); {OLDER}",
    ),
    (
        "metrics.run_dir=new checkpoint.resume=run/checkpoints/step-00000003",
        (NEWEST / "tensors.json").unlink,
        f"{IS_REFUSED} damaged: tensors.json is missing; {OLDER}",
    ),
    (
        "metrics.run_dir=new checkpoint.resume=run/checkpoints/step-00000003",
        lambda: (NEWEST / "rank-00000.json").write_bytes(b"x"),
        f"{IS_REFUSED} damaged: rank-00000.json holds 1 bytes, and manifest.json says SIZE; {OLDER}",
    ),
    (
        "metrics.run_dir=new checkpoint.resume=run/checkpoints/step-00000003",
        flip("state.json"),
        f"{IS_REFUSED} damaged: the SHA-256 of state.json is not the one that manifest.json says; {OLDER}",
    ),
    *(
        (
            "metrics.run_dir=new checkpoint.resume=run/checkpoints/step-00000003",
            edit("state.json", *change),
            f"{IS_REFUSED.removesuffix(' is')} {problem}; {OLDER}",
        )
        for change, problem in (
            (("step", None), "is damaged: state.json is that of step None"),
            (("step", 3.0), "is damaged: state.json is that of step 3.0"),
            (("world_size", 2), "is damaged: state.json is that of 2 ranks, and manifest.json lists files of 1"),
            *(
                (change, f"holds facts that this version does not read (state.json: {problem})")
                for change, problem in (
                    (("config",), "config is missing"),
                    (("config.optim", []), "config.optim is [], not a mapping"),
                    (
                        ("config.optim.name", "\x1b]0;x"),
                        "config.optim.name is '\\x1b]0;x', not a line of at most 1000 printable characters",
                    ),
                    (
                        ("config.train.steps", "3"),
                        "config.train.steps is '3', not an integer from 1 to 999999999999999",
                    ),
                    (("config.memory.optimizer_offload", 0), "config.memory.optimizer_offload is 0, not true or false"),
                    (("data", None), "data is null, not a mapping"),
                    (("data.samples", -1), "data.samples is -1, not an integer of at least 0"),
                    (
                        ("data.samples", 10**200),
                        "data.samples is 100000000000000000...0000000000000000000, not an integer of at least 0",
                    ),
                    (("global_batch",), "global_batch is missing"),
                    (("skipped_steps", True), "skipped_steps is true, not an integer from 0 to 999999999999999"),
                    (("spikes.losses", [1.0, None]), "spikes.losses[1] is null, not a finite number"),
                    (
                        ("metrics", {"metrics.jsonl": "0"}),
                        "metrics.metrics.jsonl is '0', not an integer from 0 to 9223372036854775807",
                    ),
                )
            ),
        )
    ),
    (
        "metrics.run_dir=new checkpoint.resume=run/checkpoints/step-00000007",
        lambda: NEWEST.rename(CHECKPOINTS / "step-00000007"),
        "checkpoint.resume=run/checkpoints/step-00000007 is refused: step-00000007 in run/checkpoints is damaged: its "
        f"manifest.json is that of 'step-00000003'; {OLDER}",
    ),
    (
        "metrics.run_dir=new checkpoint.resume=run/checkpoints/saved",
        lambda: NEWEST.rename(CHECKPOINTS / "saved"),
        "checkpoint.resume=run/checkpoints/saved holds a checkpoint under another name than its own, step-…; give it "
        "the name that its manifest.json says",
    ),
    (
        "metrics.run_dir=run",
        nothing,
        "metrics.run_dir=run already contains metrics.jsonl, which a run would overwrite; set checkpoint.resume=auto "
        "to continue it, or metrics.run_dir to a new folder (null for one named by time and title)",
    ),
    (
        "checkpoint.folder=run/checkpoints",
        nothing,
        "checkpoint.resume=never starts from scratch, and run/checkpoints already holds step-00000003; set "
        "checkpoint.resume=auto to resume from it, or another folder",
    ),
    (
        "metrics.run_dir=run checkpoint.resume=run/checkpoints/step-00000002",
        nothing,
        "checkpoint.resume=run/checkpoints/step-00000002 goes back to before step-00000003, which the next "
        "checkpoint.resume=auto would take; move the newer ones out of run/checkpoints, or set metrics.run_dir or "
        "checkpoint.folder to another folder",
    ),
    (
        "metrics.run_dir=run checkpoint.resume=other",
        lambda: shutil.copytree("run", "other"),
        "checkpoint.resume=other starts a run in run/checkpoints, which already holds step-00000003 of another one; "
        "set checkpoint.resume=auto to resume from that, or another folder",
    ),
    (
        "metrics.run_dir=run checkpoint.resume=auto model=gpt2_debug",
        nothing,
        "model=gpt2_debug is of the family gpt2, and the checkpoint of step 3 holds a llama model; take the "
        "settings of the config.yaml of its run",
    ),
    (
        "metrics.run_dir=run checkpoint.resume=auto model.vocab_size=300",
        nothing,
        "model.vocab_size=300 is not 256, with which the weights of the checkpoint of step 3 were made; set "
        "model.vocab_size=256",
    ),
    (
        "metrics.run_dir=run checkpoint.resume=must model.n_layers=3",
        nothing,
        "model.n_layers=3 is not 2, with which the weights of the checkpoint of step 3 were made; set model.n_layers=2",
    ),
    (
        "metrics.run_dir=new checkpoint.resume=run optim=sgd",
        nothing,
        "optim=sgd has other states than optim=adamw, with which the checkpoint of step 3 was made; set optim=adamw or "
        "start a new run in another folder",
    ),
    (
        "metrics.run_dir=run checkpoint.resume=auto memory.optimizer_offload=true memory.offload_state_dtype=bfloat16",
        nothing,
        "memory.offload_state_dtype=bfloat16 is not float32, in which the checkpoint of step 3 holds the optimizer's "
        "states; set memory.offload_state_dtype=float32",
    ),
    (
        "metrics.run_dir=run checkpoint.resume=auto optim.state_dtype=bfloat16",
        nothing,
        "optim.state_dtype=bfloat16 is not float32, in which the checkpoint of step 3 holds the optimizer's states; "
        "set optim.state_dtype=float32",
    ),
    (
        "metrics.run_dir=run checkpoint.resume=auto train.steps=2",
        nothing,
        "train.steps=2 is behind the checkpoint of step 3; set train.steps=3, or more to continue",
    ),
    (
        "metrics.run_dir=new checkpoint.folder=run/config.yaml",
        nothing,
        f"checkpoints go to run/config.yaml, which cannot be written (Not a directory); {ELSEWHERE}",
    ),
    (
        "metrics.run_dir=new checkpoint.folder=/proc/nowhere",
        nothing,
        f"checkpoints go to /proc/nowhere, which cannot be written (No such file or directory); {ELSEWHERE}",
    ),
    (
        "metrics.run_dir=/proc/nowhere",
        nothing,
        "checkpoints go to /proc/nowhere/checkpoints, which cannot be written (No such file or directory); "
        f"{ELSEWHERE}",
    ),
    (
        "metrics.run_dir=run/config.yaml checkpoint.resume=auto",
        nothing,
        "metrics.run_dir=run/config.yaml needs a folder at run/config.yaml, which is not a folder; set "
        "metrics.run_dir=runs/NAME",
    ),
    (
        "metrics.run_dir=new checkpoint.folder=://",
        nothing,
        ":// is a URL without a kind; name a local folder, or a URL such as s3://bucket/folder",
    ),
    (
        "metrics.run_dir=new checkpoint.folder=s4://bucket/run",
        nothing,
        "s4://bucket/run is of a kind unknown to fsspec (Protocol not known: s4); name a local folder, or a URL such "
        "as s3://bucket/folder",
    ),
]


def take_three_steps(config: Config) -> None:
    Run(Trainer(config)).run()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps, with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    config = compose_config([*WORDS, f"metrics.run_dir={folder}", "checkpoint.every=1", "train.steps=3"])
    config.validate(1, "cpu")
    run_ranks(1, take_three_steps, config)
    return folder


@pytest.mark.parametrize("typed, damage, sentence", MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes_are_reported_in_one_sentence(
    typed: str,
    damage: Callable[[], object],
    sentence: str,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the exact message; the existing run is unchanged."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, "run")
    size = (NEWEST / "rank-00000.json").stat().st_size
    damage()
    before = sorted(Path().rglob("*"))
    config = compose_config([*WORDS, *typed.split()])
    config.validate(1, "cpu")
    with pytest.raises(ConfigError) as caught:
        _check_places(config)
    assert str(caught.value) == sentence.replace("SIZE", str(size))
    assert sorted(Path().rglob("*")) == before


def test_valid_resume_settings_are_accepted(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: no error; the mistakes above are changes of these arguments."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, "run")
    for typed in (
        "metrics.run_dir=run checkpoint.resume=auto",
        "metrics.run_dir=run checkpoint.resume=must train.steps=9",
        "metrics.run_dir=run checkpoint.resume=run/checkpoints/step-00000003",
        "metrics.run_dir=new checkpoint.resume=run/checkpoints/step-00000002",
        "metrics.run_dir=new checkpoint.resume=auto",
        "metrics.run_dir=new",
    ):
        config = compose_config([*WORDS, *typed.split()])
        config.validate(1, "cpu")
        _check_places(config)
