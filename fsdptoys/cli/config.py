"""``fsdptoys config``: show where settings come from, copy files of groups, compare settings, and
print their JSON schema.

fsdptoys config show --config mine.yaml train.steps=5
fsdptoys config cp model/llama_debug mine
fsdptoys config diff runs/a runs/b
fsdptoys config schema --out schema.json
"""

import json
import math
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fsdptoys.config.choices import OWN_CONFIGS, find_file, list_choices
from fsdptoys.config.compose import compose_config
from fsdptoys.config.json_schema import dataclass_schema, file_schema, group_schema
from fsdptoys.config.schema import Config
from fsdptoys.config.settings import read_settings
from fsdptoys.config.sources import ABSENT, DEFAULT, differences, find_sources
from fsdptoys.device.profile import Hardware
from fsdptoys.errors import ConfigError
from fsdptoys.launch.launch import resolve_run
from fsdptoys.register import CONFIGS
from fsdptoys.sweep.definition import SweepDefinition
from fsdptoys.utils.atomic_write import write_atomically
from fsdptoys.utils.tables import align_columns
from fsdptoys.utils.text import suggestion, value_text

from .commands import check_count, parse, run_part
from .planned import choose_largest, choose_switches

OTHER_FILES = {"hardware": Hardware, "sweep": SweepDefinition}
"""Folders of ``configs`` that are no groups → the dataclass of their files."""


def config_command(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    parts = {"show": _show, "cp": _copy, "diff": _diff, "schema": _schema}
    return run_part("config", argv, parts)


def _show(argv: Sequence[str]) -> int:
    options = parse("config show", argv)
    settings = read_settings(options.config, options.arguments)
    settings.tell()
    with settings.name_origin():
        run = resolve_run(
            settings.overrides, os.environ, choose_largest, choose_switches
        )
        config = run.composition.config
        sources = find_sources(settings, run.overrides, config)
    rows: list[tuple[str, str]] = []
    _add_rows(rows, config.to_dict(), sources, "", "")
    width = min(44, max(len(line) for line, _ in rows))
    for line, source in rows:
        print(f"{line:<{width}}  # {source}" if source else line)
    return 0


def _add_rows(
    rows: list[tuple[str, str]],
    tree: dict[str, Any],
    sources: dict[str, str],
    prefix: str,
    indent: str,
) -> None:
    """Add a line of YAML and its source for each value of nested mappings."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            rows.append((f"{indent}{name}:", ""))
            _add_rows(rows, value, sources, f"{prefix}{name}.", f"{indent}  ")
            continue
        text = yaml.safe_dump(
            value, default_flow_style=True, width=math.inf, allow_unicode=True
        )
        text = text.removesuffix("...\n").strip()
        rows.append(
            (f"{indent}{name}: {text}", sources.get(f"{prefix}{name}", DEFAULT))
        )


def _copy(argv: Sequence[str]) -> int:
    options = parse("config cp", argv)
    arguments = options.arguments
    if len(arguments) == 1:
        arguments = [*arguments, f"my_{arguments[0].rpartition('/')[2]}"]
    check_count("config cp", arguments, 2, "a file and maybe a name", "GROUP/NAME [TO]")
    group, _, name = arguments[0].removesuffix(".yaml").partition("/")
    choices = list_choices()
    folders = [*choices, *OTHER_FILES]
    if group not in folders:
        fix = suggestion(group, folders, f"write one of {', '.join(folders)}/NAME")
        raise ConfigError(f"{arguments[0]} names no group; {fix}")
    names = choices.get(group) or [
        path.stem for path in sorted((CONFIGS / group).glob("*.yaml"))
    ]
    if name not in names:
        fix = suggestion(
            name, names, f"write {group}/{names[0]}, for example", f"{group}/"
        )
        raise ConfigError(f"{arguments[0]} does not exist; {fix}")
    new = arguments[1].removesuffix(".yaml")
    if not re.fullmatch(r"\w[\w.-]*", new) or new in names or new.startswith("base_"):
        raise ConfigError(
            f"{arguments[1]} cannot be the name of a new file of {group}; write a name of letters, "
            f"digits and underscores that no other has, such as my_{name}"
        )
    text = find_file(group, name).read_text(encoding="utf-8")
    if group == "model":
        text = re.sub(rf"(?m)^name: {re.escape(name)}$", f"name: {new}", text)
    path = OWN_CONFIGS / group / f"{new}.yaml"
    if path.exists():
        raise ConfigError(f"{path} exists already; name another, or remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror or error}); change into a folder that can"
        ) from error
    usages = {"hardware": f"plan plan.hardware={path}", "sweep": f"sweep {path}"}
    print(f"{path}: edit it, then fsdptoys {usages.get(group, f'train {group}={new}')}")
    return 0


def _diff(argv: Sequence[str]) -> int:
    options = parse("config diff", argv)
    arguments = options.arguments
    check_count(
        "config diff", arguments, 2, "two files, runs or lists of settings", "A B"
    )
    first, second = map(_compose, arguments)
    rows = [
        (key, _value_text(value), _value_text(other))
        for key, value, other in differences(first, second)
    ]
    if not rows:
        print("no setting differs")
        return 0
    print(*align_columns([("key", *arguments), *rows], right=()), sep="\n")
    return 1


def _value_text(value: Any) -> str:
    """Return a value; a dash for a key that the configuration does not have."""
    return "-" if value is ABSENT else value_text(value, quote=True)


def _compose(source: str) -> Config:
    """Compose the settings of a file, of a run's folder, or of a list in one word; each ``auto`` is
    resolved as on this machine, if they are valid here."""
    is_list = "=" in source and not Path(source).exists()
    overrides = shlex.split(source) if is_list else []
    settings = read_settings([] if is_list else [source], overrides)
    with settings.name_origin():
        config = compose_config(settings.overrides)
    try:
        return resolve_run(settings.overrides, os.environ).composition.config
    except ConfigError:
        return config


def _schema(argv: Sequence[str]) -> int:
    options = parse("config schema", argv)
    names = options.arguments
    if len(names) > 1:
        check_count("config schema", names, 1, "one group at most", "[GROUP]")
    if not names:
        schema = file_schema()
    elif names[0] in OTHER_FILES:
        schema = dataclass_schema(OTHER_FILES[names[0]])
    else:
        groups = [*list_choices(), *OTHER_FILES]
        if names[0] not in groups:
            fix = suggestion(names[0], groups, f"write one of {', '.join(groups)}")
            raise ConfigError(f"{names[0]} is no group; {fix}")
        schema = group_schema(names[0])
    text = json.dumps(schema, indent=1) + "\n"
    if options.out is None:
        print(text, end="")
        return 0
    try:
        write_atomically(Path(options.out), text)
    except OSError as error:
        raise ConfigError(
            f"--out {options.out} cannot be written ({error.strerror or error}); name a file in a "
            "folder that exists"
        ) from error
    return 0
