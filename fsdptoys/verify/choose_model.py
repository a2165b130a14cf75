"""The model of a verification: a preset, an own model, or a folder, in a small form."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fsdptoys.config.choices import list_choices
from fsdptoys.config.compose import compose_config
from fsdptoys.errors import ConfigError
from fsdptoys.utils.text import one_line, suggestion, value_text

from .shrink import shrink_model
from .shrink_folder import CONFIG_FILE, write_small_folder


@dataclass
class ChosenModel:
    """A model, and the overrides that choose it."""

    title: str
    overrides: list[str]
    notes: list[str] = field(default_factory=list)


def choose_model(
    names: Sequence[str], overrides: Sequence[str], scratch: Path, *, full: bool
) -> ChosenModel:
    """Return the model of a command line, in a small form unless ``full``.

    Args:
        names: presets, own models or folders; at most one.
        overrides: settings.
        scratch: empty folder for a small ``config.json``, which must stay until the end.
        full: keep the model's size.

    Raises:
        ConfigError: for an unknown name, a folder without ``config.json``, or no model at all.
    """
    settings = list(overrides)
    chosen = [word for word in settings if word.startswith("model=")]
    if names and chosen:
        raise ConfigError(
            f"{names[0]} and {chosen[0]} both name the model; leave out one of them"
        )
    if not names and not chosen:
        raise ConfigError(
            "fsdptoys verify needs a model; write fsdptoys verify llama_debug, or a folder with a "
            "config.json"
        )
    title = names[0] if names else chosen[0].removeprefix("model=")
    values = dict(word.partition("=")[::2] for word in overrides)
    source = Path(values.get("model.path", "")).expanduser()
    if names and _is_folder(names[0]):
        source = Path(names[0]).expanduser()
        settings = ["model=transformers", f"model.path={quoted(source)}", *settings]
    elif names:
        settings = [f"model={_preset(names[0])}", *settings]
    if not full and "model=transformers" in settings:
        notes = write_small_folder(source, scratch)
        settings = [word for word in settings if not word.startswith("model.path=")]
        return ChosenModel(title, [*settings, f"model.path={quoted(scratch)}"], notes)
    if full:
        return ChosenModel(title, settings)
    return _small(title, settings)


def quoted(path: Path) -> str:
    """Return a path as an override's value."""
    return value_text(str(path), quote=True)


def _is_folder(name: str) -> bool:
    return Path(name).expanduser().is_dir() and (
        "/" in name or Path(name, CONFIG_FILE).is_file()
    )


def _preset(name: str) -> str:
    """Return the name of a preset or an own model."""
    presets = list_choices()["model"]
    if name in presets:
        return name
    fix = suggestion(name, presets, "see fsdptoys models")
    raise ConfigError(
        f"{name} is neither a model preset nor a folder with a {CONFIG_FILE}; {fix}"
    )


def _small(title: str, settings: list[str]) -> ChosenModel:
    """Add overrides that shrink the model, except of keys that the command line sets."""
    config = compose_config(settings)
    keys = {word.partition("=")[0] for word in settings}
    positions = config.train.seq_len if "train.seq_len" in keys else 1
    changes = {
        f"model.{name}": value
        for name, value in shrink_model(config.model, positions).items()
        if f"model.{name}" not in keys
    }
    if not changes:
        return ChosenModel(title, settings)
    small = [f"{key}={value_text(value)}" for key, value in changes.items()]
    try:
        compose_config([*settings, *small])
    except ConfigError as mistake:
        raise ConfigError(
            f"{title} has no small form with these settings ({one_line(mistake)}); write --full, "
            "or set the model's sizes"
        ) from mistake
    return ChosenModel(title, [*settings, *small], [f"small form: {' '.join(small)}"])
