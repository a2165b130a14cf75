"""Settings that go together are accepted; others are refused with a sentence of ``tests/messages``."""

import importlib.util

import pytest
import torch

from fsdptoys.config.compose import compose_config
from fsdptoys.errors import ConfigError
from fsdptoys.parallel import FSDP2Config
from fsdptoys.parallel.context import ContextForm


@pytest.mark.parametrize(
    ("ranks", "device_type", "words"),
    [
        (2, "cpu", ""),
        (96, "cuda", "parallel=fsdp1"),
        (2, "cuda", "parallel=ddp optim=sgd train.deterministic=true optim.implementation=fused"),
    ],
    ids=["defaults", "flat parameters in more shards than rows", "fused SGD on CUDA"],
)
def test_settings_that_go_together_are_accepted(ranks: int, device_type: str, words: str) -> None:
    """Oracle: no error."""
    compose_config(words.split()).validate(ranks, device_type)


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


def test_number_of_too_many_digits_is_refused() -> None:
    """Oracle: the expected message, without the number."""
    with pytest.raises(ConfigError) as caught:
        compose_config([f"train.steps={'9' * 5000}"])
    assert str(caught.value) == "train.steps has a number of 5000 digits; write train.steps=VALUE with fewer"


def test_number_beyond_floating_point_is_refused() -> None:
    """Oracle: the expected message."""
    number = f"1{'0' * 400}"
    with pytest.raises(ConfigError) as caught:
        compose_config([f"optim.lr={number}"])
    assert str(caught.value) == f"optim.lr={number} must be a finite number; set optim.lr=0.0003"
