"""Mode and credentials of Weights & Biases, from the configuration and where wandb keeps them."""

import configparser
import netrc
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from fsdptoys.errors import ConfigError

from .config import MetricsConfig, WandbMode

WANDB_MODES = {
    "online": "online",
    "run": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}
"""Values of WANDB_MODE → value of ``WandbMode``."""

WANDB_URL = "https://api.wandb.ai"


def check_wandb(config: MetricsConfig, environment: Mapping[str, str]) -> None:
    """Check that wandb has credentials for online mode."""
    if wandb_mode(config, environment) is not WandbMode.online:
        return
    if not _has_wandb_key(environment):
        raise ConfigError(
            "metrics.wandb_mode=online needs an API key for Weights & Biases, and there is none; "
            "set WANDB_API_KEY, run wandb login, or set metrics.wandb_mode=offline"
        )


def wandb_mode(config: MetricsConfig, environment: Mapping[str, str]) -> WandbMode:
    """The mode of Weights & Biases, from the config or WANDB_MODE; ConfigError for an unknown value
    of the latter."""
    if config.wandb_mode is not None:
        return config.wandb_mode
    mode = environment.get("WANDB_MODE") or "online"
    if mode not in WANDB_MODES:
        raise ConfigError(
            f"WANDB_MODE={mode} must be one of {', '.join(mode.value for mode in WandbMode)}; "
            "unset it, or set metrics.wandb_mode=offline"
        )
    return WandbMode(WANDB_MODES[mode])


def _has_wandb_key(environment: Mapping[str, str]) -> bool:
    """Whether credentials exist where wandb looks for them, without importing it."""
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    return _is_in_netrc(environment.get("WANDB_BASE_URL") or _wandb_url(environment))


def _is_in_netrc(url: str) -> bool:
    """Whether the user's netrc file has a password for a server."""
    netrc_variable = os.environ.get("NETRC")
    paths = (
        [Path(netrc_variable)]
        if netrc_variable
        else [Path.home() / ".netrc", Path.home() / "_netrc"]
    )
    path = next((path for path in paths if path.is_file()), None)
    host = urlsplit(url).hostname
    if path is None or host is None:
        return False
    with suppress(netrc.NetrcParseError, OSError, UnicodeDecodeError):
        return netrc.netrc(str(path)).authenticators(host) is not None
    return False


def _wandb_url(environment: Mapping[str, str]) -> str:
    """The server saved by ``wandb login --host``."""
    settings = configparser.ConfigParser(interpolation=None)
    folder = Path(
        environment.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb"
    )
    with suppress(OSError, configparser.Error, UnicodeDecodeError):
        settings.read(folder / "settings")
        return settings.get("default", "base_url", fallback=WANDB_URL)
    return WANDB_URL
