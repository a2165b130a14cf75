"""A fingerprint tells runs apart by what decides them, and by nothing else."""

import copy
import subprocess
from pathlib import Path

import pytest

import fsdptoys
from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.sweep import fingerprint as module
from fsdptoys.sweep.fingerprint import fingerprint


def config(*words: str) -> Config:
    found = compose_config(["model=llama_debug", "data=synthetic", *words])
    found.validate(2, "cpu")
    return found


@pytest.fixture(scope="module")
def base() -> Config:
    return config()


@pytest.mark.parametrize(
    "word",
    ["metrics.run_dir=elsewhere", "metrics.console=plain", "launch.nproc_per_node=2", "launch.device=cpu",
     "mesh.fsdp_size=2", "mesh.fsdp_size=node", "train.data_seed=0", "parallel.reduce_dtype=float32"],
)  # fmt: skip
def test_what_changes_nothing_is_not_in_it(base: Config, word: str) -> None:
    """Where a run writes, and values that say what ``auto`` or a default resolves to."""
    assert fingerprint(config(word), 2, "a CPU") == fingerprint(base, 2, "a CPU")


@pytest.mark.parametrize("word", ["train.steps=11", "mesh.fsdp_size=1", "parallel=ddp", "train.seed=1", "patches=[]"])
def test_what_changes_the_run_is_in_it(base: Config, word: str) -> None:
    """Any setting that a trainer reads."""
    assert fingerprint(config(word), 2, "a CPU") != fingerprint(base, 2, "a CPU")


def test_ranks_device_and_versions_are_in_it(base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same configuration on something else is another run."""
    numbers = {fingerprint(base, 2, "a CPU"), fingerprint(base, 4, "a CPU"), fingerprint(base, 2, "another")}
    monkeypatch.setattr(module, "code_version", lambda: "another commit")
    numbers.add(fingerprint(base, 2, "a CPU"))
    monkeypatch.setattr(module.torch, "__version__", "another version")
    numbers.add(fingerprint(base, 2, "a CPU"))
    assert len(numbers) == 5
    monkeypatch.undo()
    assert fingerprint(copy.deepcopy(base), 2, "a CPU") in numbers


def test_a_changed_checkout_is_told_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two changes on top of one commit: git calls both dirty, the files are not the same."""
    package = tmp_path / "fsdptoys"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(fsdptoys, "__file__", str(package / "__init__.py"))
    versions = []
    for text in ("", "a = 1\n", "a = 2\n"):
        (package / "__init__.py").write_text(text)
        versions.append(module.code_version.__wrapped__())
    assert len(set(versions)) == 3
    assert "-dirty" not in versions[0] and "-dirty" in versions[1]
