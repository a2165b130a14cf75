"""Files and words that name code: nothing that a command reads is imported or executed.

Each case plants ``planted.py`` where Python finds it, and a file or a word that names it or holds a
pickle of it. Importing, calling or unpickling it would write a marker.
"""

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from fsdptoys.cli.main import main
from fsdptoys.imports import VARIABLE, load_imports
from fsdptoys.models import LlamaConfig
from tests.harness.families import SIZES
from tests.harness.own_code import forgotten_imports
from tests.harness.recorded_runs import run_of, write_run
from tests.harness.saved_runs import save_run

MODULE = "planted"
SOURCE = """
from pathlib import Path

MARKER = Path(__file__).with_name("MARKER")
MARKER.touch()


class Planted:
    def __init__(self, *arguments, **settings):
        MARKER.touch()

    def __reduce__(self):
        return run, ()


def run(*arguments, **settings):
    MARKER.touch()


name = __name__
"""

MODEL = LlamaConfig(**{**SIZES, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 112})

Edit = Callable[[Path], object]


class Case(NamedTuple):
    """What names the code, and the commands that read it."""

    edit: Edit | None
    commands: tuple[str, ...]


def pickle_of_planted() -> bytes:
    """A pickle that imports the module, and calls its function."""
    return b"cplanted\nrun\n(tR."


def settings(text: str) -> Edit:
    """Add lines to the configuration of the run."""

    def edit(folder: Path) -> None:
        path = folder / "run" / "config.yaml"
        path.write_text(f"{path.read_text()}{text}\n")

    return edit


def setting(**values: Any) -> Edit:
    """Change settings of the run, by dotted keys with two underscores for each dot."""

    def edit(folder: Path) -> None:
        path = folder / "run" / "config.yaml"
        tree = yaml.safe_load(path.read_text())
        for key, value in values.items():
            section, _, name = key.partition("__")
            if name:
                tree.setdefault(section, {})[name] = value
            else:
                tree[section] = value
        path.write_text(yaml.safe_dump(tree))

    return edit


def described(**values: Any) -> Edit:
    """Add keys to the ``config.json`` of the folder in Hugging Face format."""

    def edit(folder: Path) -> None:
        path = folder / "hf" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        (folder / "hf" / "modeling_planted.py").write_text(SOURCE)
        (folder / "hf" / "planted.py").write_text(SOURCE)

    return edit


def file(name: str, content: bytes | str) -> Edit:
    """Write a file."""

    def edit(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return edit


def typed_words(*commands: str) -> Case:
    """Commands that name code by themselves."""
    return Case(None, commands)


READ_RUN = (
    "generate run --prompt 1 --tokenizer ids --tokens 1",
    "report run --table",
    "compare run run",
    "evaluate run --windows 1",
    "plan calibrate run",
    "convert to-hf run out",
    "train metrics.run_dir=run checkpoint.resume=auto --cfg job",
)
READ_HF = (
    "convert from-hf hf",
    "generate hf --prompt 1 --tokenizer ids --tokens 1",
    "train model=llama_debug model.init_from=hf --cfg job",
)
TAGS = {
    "apply": "!!python/object/apply:planted.run []",
    "new": "!!python/object/new:planted.Planted []",
    "object": "!!python/object:planted.Planted {}",
    "name": "!!python/name:planted.run",
    "module": "!!python/module:planted",
}

COMMAND_LINE = {
    "a target of Hydra": typed_words("train +_target_=planted.run --cfg job"),
    "a target in a section": typed_words(
        "train optim._target_=planted.Planted --cfg job",
        "train +model._target_=planted.Planted --cfg job",
    ),
    "a choice": typed_words(
        *(
            f"train {group}={name} --cfg job"
            for group in ("model", "data", "optim", "parallel", "tune", "experiment")
            for name in ("planted", "planted.Planted", "./planted.py")
        )
    ),
    "imports as a key": typed_words(
        "train imports=[planted] --cfg job",
        "train +imports=[planted.py] --cfg job",
        "train imports=[{name:planted,sha256:0}] --cfg job",
    ),
    "callbacks of Hydra": typed_words(
        "train hydra.callbacks.x._target_=planted.Planted --cfg job",
        "train hydra.searchpath=[pkg://planted] --cfg job",
        "train hydra/job_logging=planted --cfg job",
    ),
    "a launcher": typed_words(
        "sweep optim.lr=1,2 hydra/launcher=planted --dry-run",
        "sweep optim.lr=1,2 hydra.launcher._target_=planted.run --dry-run",
    ),
    "names in lists": typed_words(
        "train patches=[planted] --cfg job",
        "train metrics.writers=[planted] --cfg job",
        "train train.callbacks=[planted] --cfg job",
        "train parallel.wrap=block parallel.wrap_classes=[planted.Planted] --cfg job",
    ),
    "an interpolation": typed_words(
        "train 'model.name=${planted:run}' --cfg job",
        "train 'model.name=${hydra:planted}' --cfg job",
    ),
}
"""Words of a command line."""

RUNS = {
    "imports of a run": Case(
        setting(imports=[{"name": "planted", "sha256": "0" * 64}]), READ_RUN
    ),
    "imports of a file": Case(
        setting(imports=[{"name": "planted.py", "sha256": "0" * 64}]), READ_RUN
    ),
    "imports as words": Case(setting(imports=["planted", "./planted.py"]), READ_RUN),
    "imports as text": Case(setting(imports="planted"), READ_RUN),
    "a family": Case(setting(model__family="planted"), READ_RUN),
    "a target": Case(setting(model___target_="planted.Planted"), READ_RUN),
    "a target at the root": Case(setting(_target_="planted.run"), READ_RUN),
    "an optimizer": Case(setting(optim__name="planted.Planted"), READ_RUN),
    "a strategy": Case(setting(parallel__name="planted"), READ_RUN),
    "data": Case(setting(data__name="planted"), READ_RUN),
    "a loss": Case(setting(loss={"name": "planted"}), READ_RUN),
    "writers and callbacks": Case(
        setting(
            metrics__writers=["planted"],
            train__callbacks=["planted"],
            callbacks={"planted": {}},
        ),
        READ_RUN,
    ),
    "defaults": Case(setting(defaults=["planted", "_self_"]), READ_RUN),
    "a hardware profile": Case(
        setting(plan={"hardware": "planted.py"}), ("plan calibrate run",)
    ),
    **{
        f"a tag, {name}": Case(settings(f"extra: {tag}"), READ_RUN)
        for name, tag in TAGS.items()
    },
    "a pickle as the configuration": Case(
        file("run/config.yaml", pickle_of_planted()), READ_RUN
    ),
    "pickles beside the weights": Case(
        lambda folder: [
            (folder / "run" / "weights" / name).write_bytes(pickle_of_planted())
            for name in ("pytorch_model.bin", "weights.pt", "model.pkl")
        ],
        READ_RUN,
    ),
    "pickles for checkpoints": Case(
        lambda folder: [
            file(f"run/checkpoints/step-1/{name}", pickle_of_planted())(folder)
            for name in (".metadata", "__0_0.distcp", "state.json", "rank-00000.json")
        ],
        (*READ_RUN, "checkpoint verify run"),
    ),
}
"""Run directories."""

FOLDERS = {
    "a map of classes": Case(
        described(
            auto_map={
                "AutoConfig": "planted.Planted",
                "AutoModelForCausalLM": "modeling_planted.Planted",
            }
        ),
        READ_HF,
    ),
    "an architecture": Case(described(architectures=["planted.Planted"]), READ_HF),
    "a type of model": Case(described(model_type="planted"), READ_HF),
    "a file of pipelines": Case(
        described(custom_pipelines={"text-generation": {"impl": "planted.Planted"}}),
        READ_HF,
    ),
    "a class of tokenizers": Case(
        file(
            "hf/tokenizer_config.json",
            json.dumps(
                {
                    "tokenizer_class": "planted.Planted",
                    "auto_map": {"AutoTokenizer": ["planted.Planted", None]},
                }
            ),
        ),
        (*READ_HF, "generate hf --prompt 1 --tokens 1"),
    ),
    "a chat template": Case(
        file(
            "hf/chat_template.jinja",
            "{{ ''.__class__.__base__.__subclasses__() }}{% import 'planted' as p %}",
        ),
        ("generate hf --prompt 1 --tokenizer ids --chat --tokens 1",),
    ),
    "a pickle for the weights": Case(
        file("hf/pytorch_model.bin", pickle_of_planted()), READ_HF
    ),
    "a pickle alone": Case(
        lambda folder: [
            (folder / "hf" / "model.safetensors").unlink(),
            file("hf/pytorch_model.bin", pickle_of_planted())(folder),
        ],
        READ_HF,
    ),
}
"""Folders in Hugging Face format."""

OTHERS = {
    **{
        f"a hardware profile with a tag, {name}": Case(
            file("mine.yaml", f"title: {tag}\n"),
            ("plan model=llama_debug plan.hardware=mine.yaml",),
        )
        for name, tag in TAGS.items()
    },
    "a sweep's definition": Case(
        file("mine.yaml", "description: x\nsettings: !!python/name:planted.run\n"),
        ("sweep mine.yaml --dry-run",),
    ),
    "a sweep's folder": Case(
        file(
            "sweep/sweep.json",
            json.dumps(
                {
                    "title": "x",
                    "command": "python planted.py",
                    "jobs": [],
                    "skipped": [],
                    "time_limit_seconds": None,
                    "words": ["--import=planted", "optim=planted"],
                    "launcher_overrides": ["hydra.launcher._target_=planted.run"],
                }
            ),
        ),
        ("sweep --resume sweep", "report sweep --table"),
    ),
}
"""Other files that commands read."""

CASES = {**COMMAND_LINE, **RUNS, **FOLDERS, **OTHERS}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with weights and steps, and its folder in Hugging Face format."""
    folder = tmp_path_factory.mktemp("files")
    write_run(folder / "run", run_of(4))
    save_run(folder / "run", MODEL)
    assert main(["convert", "to-hf", str(folder / "run"), str(folder / "hf")]) == 0
    return folder


@pytest.fixture
def folder(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the files beside a planted module that Python finds."""
    folder = tmp_path / "work"
    shutil.copytree(files, folder)
    (folder / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return folder


def split(command: str) -> list[str]:
    """Arguments of a command; only whole words are quoted."""
    return [word.strip("'") for word in command.split(" ")]


@pytest.mark.parametrize("name", CASES)
def test_what_names_code_runs_nothing(name: str, folder: Path) -> None:
    """Oracle: the marker that the planted module writes, and the modules of this process."""
    case = CASES[name]
    if case.edit is not None:
        case.edit(folder)
    for command in case.commands:
        main(split(command))
        assert not (folder / "MARKER").exists(), command
        assert MODULE not in sys.modules, command


def test_the_planted_module_runs_where_it_is_named_to_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the marker, after an import and after a pickle; so the test above sees both."""
    pickle.loads(pickle_of_planted())
    assert (folder / "MARKER").exists()
    (folder / "MARKER").unlink()
    monkeypatch.delitem(sys.modules, MODULE)
    with forgotten_imports():
        load_imports(["./planted.py"])
    assert (folder / "MARKER").exists()
