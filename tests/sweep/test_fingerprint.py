"""A fingerprint separates runs by the settings that decide their results, and by nothing else."""

import copy
import subprocess
from pathlib import Path

import pytest

import fsdptoys
from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.sweep import validate as module
from fsdptoys.sweep.validate import fingerprint


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
def test_settings_without_effect_are_excluded(base: Config, word: str) -> None:
    """Oracle: output paths, and explicit values equal to those that ``auto`` or a default resolves to."""
    assert fingerprint(config(word), 2, "a CPU") == fingerprint(base, 2, "a CPU")


@pytest.mark.parametrize("word", ["train.steps=11", "mesh.fsdp_size=1", "parallel=ddp", "train.seed=1", "patches=[]"])
def test_settings_with_effect_are_included(base: Config, word: str) -> None:
    """Oracle: any setting that a trainer reads."""
    assert fingerprint(config(word), 2, "a CPU") != fingerprint(base, 2, "a CPU")


def test_ranks_device_and_versions_are_included(base: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the same configuration on another device, rank count or version is another run."""
    numbers = {fingerprint(base, 2, "a CPU"), fingerprint(base, 4, "a CPU"), fingerprint(base, 2, "another")}
    monkeypatch.setattr(module, "code_version", lambda: "another commit")
    numbers.add(fingerprint(base, 2, "a CPU"))
    monkeypatch.setattr(module.torch, "__version__", "another version")
    numbers.add(fingerprint(base, 2, "a CPU"))
    assert len(numbers) == 5
    monkeypatch.undo()
    assert fingerprint(copy.deepcopy(base), 2, "a CPU") in numbers


def test_changed_checkout_is_recognized_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: two changes on top of one commit: git calls both dirty, the files differ."""
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
