"""The mode and the key of Weights & Biases, checked before a run starts."""

import sys
from pathlib import Path

import pytest

from fsdptoys.errors import ConfigError
from fsdptoys.metrics import MetricsConfig
from fsdptoys.metrics.config import WandbMode
from fsdptoys.metrics.registry import check_writers
from fsdptoys.metrics.wandb_account import wandb_mode

NO_KEY = (
    "metrics.wandb_mode=online needs an API key for Weights & Biases, and there is none; set "
    "WANDB_API_KEY, run wandb login, or set metrics.wandb_mode=offline"
)


NO_MODE = (
    "WANDB_MODE=shared must be one of online, offline, disabled; unset it, or set "
    "metrics.wandb_mode=offline"
)


@pytest.mark.parametrize(
    ("mode", "variables", "netrc", "sentence"),
    [
        (None, {}, "", NO_KEY),
        ("online", {"WANDB_MODE": "offline"}, "", NO_KEY),
        (None, {"WANDB_API_KEY": "k" * 40}, "", None),
        (None, {"WANDB_IDENTITY_TOKEN_FILE": "token.txt"}, "", None),
        (None, {}, "machine api.wandb.ai login user password kkkk", None),
        (None, {}, "machine own.example login user password kkkk", NO_KEY),
        (
            None,
            {"WANDB_BASE_URL": "https://own.example"},
            "machine own.example login user password kkkk",
            None,
        ),
        (
            None,
            {"settings": "https://own.example"},
            "machine own.example login user password kkkk",
            None,
        ),
        (None, {}, "not a netrc", NO_KEY),
        ("offline", {}, "", None),
        ("disabled", {}, "", None),
        (None, {"WANDB_MODE": "offline"}, "", None),
        (None, {"WANDB_MODE": "dryrun"}, "", None),
        (None, {"WANDB_MODE": "shared"}, "", NO_MODE),
    ],
)
def test_going_online_needs_a_key(
    mode, variables, netrc, sentence, tmp_path, monkeypatch
) -> None:
    """Oracle: the expected message, or none, over the places in which wandb keeps keys."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    present = {name: value for name, value in variables.items() if name.isupper()}
    (tmp_path / ".netrc").write_text(netrc)
    if "settings" in variables:
        (tmp_path / ".config" / "wandb").mkdir(parents=True)
        (tmp_path / ".config" / "wandb" / "settings").write_text(
            f"[default]\nbase_url = {variables['settings']}\n"
        )
    config = MetricsConfig(
        writers=["wandb"], wandb_mode=WandbMode(mode) if mode else None
    )
    if sentence is None:
        check_writers(config, present)
    else:
        with pytest.raises(ConfigError) as error:
            check_writers(config, present)
        assert str(error.value) == sentence


def test_key_is_found_without_the_package_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: no exception, where importing ``requests`` raises one; wandb needs it no more."""
    pytest.importorskip("wandb")
    monkeypatch.setitem(sys.modules, "requests", None)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password kkkk")
    check_writers(MetricsConfig(writers=["wandb"]), {})


def test_wandb_mode_setting_precedes_the_environment() -> None:
    """Oracle: the order in which the field's docstring names them."""
    config = MetricsConfig(writers=["wandb"], wandb_mode=WandbMode.disabled)
    assert wandb_mode(config, {"WANDB_MODE": "offline"}) is WandbMode.disabled
    config = MetricsConfig(writers=["wandb"])
    assert wandb_mode(config, {"WANDB_MODE": "run"}) is WandbMode.online
