"""``memory.gradient_checkpointing`` takes a boolean on the command line, in YAML files, sweeps and plans."""

import shutil
import sys
from pathlib import Path

import pytest

from fsdptoys.cli.plan import compose_hypothetical
from fsdptoys.cli.sweep import read_words
from fsdptoys.config import compose, overrides
from fsdptoys.errors import ConfigError
from fsdptoys.sweep.axes import combine, read_axes
from fsdptoys.sweep.validate import ValidJob, validate_combinations

KEY = "memory.gradient_checkpointing"
MODES = {"true": "full", "on": "full", "yes": "full", "True": "full", "'on'": "full", "full": "full"}
IN_FILES = ("true", "'on'", "off", "full", "none")
MODES |= {"false": "none", "off": "none", "no": "none", "OFF": "none", "none": "none", "selective": "selective"}


@pytest.mark.parametrize("typed", MODES)
def test_booleans_choose_full_or_none_on_the_command_line(typed: str) -> None:
    """Oracle: the table above; a recorded configuration contains the choice."""
    assert compose.compose_config([f"{KEY}={typed}"]).to_dict()["memory"]["gradient_checkpointing"] == MODES[typed]


def test_booleans_choose_full_or_none_in_yaml_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the same table, in a copy of ``configs/`` with an experiment per value; other values are refused."""
    folder = tmp_path / "copied_configs"
    shutil.copytree(overrides.CONFIGS, folder)
    for index, typed in enumerate([*IN_FILES, "maybe"]):
        text = f"# @package _global_\ndefaults: [_self_]\nmemory:\n  gradient_checkpointing: {typed}\n"
        (folder / "experiment" / f"typed{index}.yaml").write_text(text)
    monkeypatch.setattr(overrides, "CONFIGS", folder)
    monkeypatch.setattr(compose, "CONFIG_MODULE", folder.name)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        for index, typed in enumerate(IN_FILES):
            config = compose.compose_config([f"experiment=typed{index}"])
            assert config.to_dict()["memory"]["gradient_checkpointing"] == MODES[typed]
            assert type(config) is compose.Config and type(config.memory) is compose.MemoryConfig
        with pytest.raises(ConfigError, match=r"Invalid value 'maybe', expected one of \[none, full, selective\]"):
            compose.compose_config([f"experiment=typed{len(IN_FILES)}"])
    finally:
        sys.modules.pop(folder.name, None)


@pytest.mark.usefixtures("unmeasured")
def test_booleans_are_swept_and_planned() -> None:
    """Oracle: the choices of the composed jobs and plan."""
    words = [f"{KEY}=false,true", "experiment=null", "model=llama_debug", "launch.device=cpu"]
    axes = read_axes(read_words(words).words, overrides.list_choices())
    jobs = validate_combinations(combine([], [], axes))
    modes = [job.config.memory.gradient_checkpointing.name for job in jobs if isinstance(job, ValidJob)]
    assert modes == ["none", "full"]
    planned = compose_hypothetical([f"{KEY}=on", "model=llama3_1b", "plan.hardware=h100"])
    assert planned.config.memory.gradient_checkpointing.name == "full"
