"""``fsdptoys new``: write a small working file of own code, and its test."""

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template

from fsdptoys.config.choices import list_choices
from fsdptoys.errors import ConfigError
from fsdptoys.register import KINDS, WORDS, registered
from fsdptoys.utils.regular_file import open_regular
from fsdptoys.utils.text import suggestion

from .commands import check_count, parse

TEMPLATES = Path(__file__).with_name("templates")

SETTINGS = {
    "model": ["optim.lr=0.01"],
    "optimizer": ["model=llama_debug", "optim.lr=0.001"],
    "data": ["model=llama_debug", "optim.lr=0.01"],
    "loss": ["model=llama_debug", "optim.lr=0.01"],
}
"""Kind → settings with which its test trains."""


def new_command(argv: Sequence[str]) -> int:
    """Run ``fsdptoys new KIND NAME``; return the exit status."""
    arguments = parse("new", argv).arguments
    form = f"{'|'.join(list_kinds())} NAME"
    check_count("new", arguments, 2, "a kind and a name", form)
    kind, name = arguments
    if kind not in list_kinds():
        fix = suggestion(
            kind, list_kinds(), f"write fsdptoys new {form}", "fsdptoys new "
        )
        raise ConfigError(f"{kind} is not a kind of own code; {fix}")
    _check_name(kind, name)
    files = {Path(f"{name}.py"): kind, Path(f"test_{name}.py"): f"test_{kind}"}
    for path in files:
        if path.exists() or path.is_symlink():
            raise ConfigError(f"{path} exists already; choose another name")
    for path, template in files.items():
        with open_regular(path, "xb") as file:
            file.write(fill(template, kind, name).encode())
    group = KINDS[kind].group
    print(
        f"wrote {name}.py and test_{name}.py; try:\n"
        f"  fsdptoys train --import ./{name}.py {use_of(group, name)}\n"
        f"  python -m pytest test_{name}.py"
    )
    return 0


def list_kinds() -> list[str]:
    """Return the kinds that have a template."""
    return [kind for kind in KINDS if (TEMPLATES / f"{kind}.txt").is_file()]


def use_of(group: str, name: str) -> str:
    """Return the override that uses a registered class."""
    keys = {"writers": "metrics.writers", "callbacks": "train.callbacks"}
    return f"{keys[group]}=[{name}]" if group in keys else f"{group}={name}"


def fill(template: str, kind: str, name: str) -> str:
    """Fill a template with a name."""
    settings = [use_of(KINDS[kind].group, name), *SETTINGS.get(kind, [])]
    values = {
        "name": name,
        "title": name.title().replace("_", ""),
        "settings": json.dumps(settings),
    }
    values["trains"] = Template(_read("trains")).substitute(values).rstrip()
    return Template(_read(template)).substitute(values)


def _read(template: str) -> str:
    return (TEMPLATES / f"{template}.txt").read_text(encoding="utf-8")


def _check_name(kind: str, name: str) -> None:
    """Refuse a name that cannot be registered, or that a module has, which a file could not."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in WORDS:
        raise ConfigError(
            f"{name} cannot be registered; use small letters, digits and underscores, with a "
            "letter at first"
        )
    group = KINDS[kind].group
    names = {*list_choices().get(group, ()), *registered(group)}
    if name in names or importlib.util.find_spec(name) is not None:
        owner = f"{group}={name}" if name in names else f"the module {name}"
        raise ConfigError(f"{name} is taken by {owner}; choose another name")
