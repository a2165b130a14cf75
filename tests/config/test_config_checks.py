"""Settings that go together, and booleans for choices; others are refused with a sentence of ``tests/messages``."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch

from fsdptoys.cli.plan import compose_hypothetical
from fsdptoys.cli.sweep import read_words
from fsdptoys.config import compose, overrides
from fsdptoys.config.compose import compose_config
from fsdptoys.errors import ConfigError
from fsdptoys.parallel import FSDP2Config
from fsdptoys.parallel.context import ContextForm
from fsdptoys.sweep.axes import combine, read_axes
from fsdptoys.sweep.validate import ValidJob, validate_combinations


@pytest.mark.parametrize(
    ("ranks", "device_type", "words"),
    [
        (2, "cpu", ""),
        (96, "cuda", "parallel=fsdp1"),
        (2, "cuda", "parallel=ddp optim=sgd train.deterministic=true optim.implementation=fused"),
        (1, "cpu", "kernels.attention=flash data.mask_documents=true"),
        (1, "cpu", "kernels.attention=math"),
        (1, "cuda", "kernels.attention=cudnn parallel.param_dtype=bfloat16"),
        (1, "cuda", "kernels.attention=efficient data.mask_documents=true"),
        (1, "cuda", "kernels.attention=flash parallel.param_dtype=float16"),
    ],
)
def test_settings_that_go_together_are_accepted(ranks: int, device_type: str, words: str) -> None:
    """Oracle: no error; the settings stay."""
    config = compose_config(words.split())
    attention = config.kernels.attention
    config.validate(ranks, device_type)
    assert attention.value == "auto" or config.kernels.attention is attention


@pytest.mark.parametrize(
    ("cp_size", "form"), [(2, ContextForm.ulysses), (4, ContextForm.ulysses), (6, ContextForm.gathered)]
)
def test_heads_are_exchanged_where_ranks_divide_them(cp_size: int, form: ContextForm) -> None:
    """Oracle: four heads."""
    config = compose_config(["experiment=null", "model=llama_debug", f"mesh.cp_size={cp_size}", "train.seq_len=96"])
    config.validate(12, "cpu")
    assert isinstance(config.parallel, FSDP2Config) and config.parallel.context is form


@pytest.mark.parametrize(
    ("installed", "fault"),
    [
        (False, "is not installed; run pip install 'fsdptoys[torchao]'"),
        (True, f"cannot be imported with torch {torch.__version__}; install torch 2.11 or newer"),
    ],
    ids=["not installed", "torch too old"],
)
def test_low_bit_states_without_torchao_are_refused(
    installed: bool, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the expected message; torch 2.7 lacks the name that torchao imports."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    monkeypatch.delattr(torch.nn.functional, "ScalingType", raising=False)
    with pytest.raises(ConfigError) as caught:
        compose_config(["optim.state_dtype=int4"]).validate(2, "cpu")
    assert str(caught.value) == (
        f"optim.state_dtype=int4 needs the package torchao, which {fault}, or set optim.state_dtype=bfloat16"
    )


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        (f"train.steps={'9' * 5000}", "train.steps has a number of 5000 digits; write train.steps=VALUE with fewer"),
        (f"optim.lr=1{'0' * 400}", f"optim.lr=1{'0' * 400} must be a finite number; set optim.lr=0.0003"),
    ],
    ids=["too many digits", "beyond floating point"],
)
def test_too_large_number_is_refused(word: str, sentence: str) -> None:
    """Oracle: the expected message."""
    with pytest.raises(ConfigError) as caught:
        compose_config([word])
    assert str(caught.value) == sentence


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
