"""A named sweep: a YAML file of ``configs/sweep`` or of the user, read into one dataclass and
checked.

It is not a Hydra config group: it describes variations between runs and is not part of any run's
configuration.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdptoys.errors import ConfigError
from fsdptoys.register import CONFIGS
from fsdptoys.utils.bounds import above
from fsdptoys.utils.foreign import parse_yaml
from fsdptoys.utils.from_tree import build
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.text import one_line, suggestion, value_text

SWEEPS = CONFIGS / "sweep"
LARGEST_FILE_BYTES = 2**20


@dataclass(frozen=True)
class SweepDefinition:
    """Content of a sweep's file."""

    title: str = ""
    """Short title, part of the folder's name; the file's name by default."""
    description: str = ""
    """Purpose of the comparison."""
    base: tuple[str, ...] = ()
    """Words of all jobs."""
    grid: dict[str, list[Any]] = field(default_factory=dict)
    """Key → values; all combinations are run, the last key varying fastest."""
    rows: tuple[tuple[str, ...], ...] = ()
    """Words of each job, instead of a grid."""
    time_limit_seconds: float | None = field(default=None, metadata=above(0))
    """Time limit of one job; null for none."""


def list_sweeps() -> dict[str, str]:
    """Return the name and description of each sweep of the package."""
    return {
        path.stem: read_definition(path.stem).description
        for path in sorted(SWEEPS.glob("*.yaml"))
    }


def is_file_name(name: str) -> bool:
    """Return whether a sweep's name is the path of a user's file."""
    return name.endswith((".yaml", ".yml"))


def read_definition(name: str) -> SweepDefinition:
    """Read a sweep's file.

    Args:
        name: a sweep of the package, or a path ending in ``.yaml`` or ``.yml``.

    Raises:
        ConfigError: for the first mistake.
    """
    path = SWEEPS / f"{name}.yaml"
    if is_file_name(name):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(
                f"{name} does not exist; name a YAML file like those of configs/sweep"
            )
    elif "/" in name or not path.is_file():
        names = sorted(file.stem for file in SWEEPS.glob("*.yaml"))
        fix = suggestion(
            name,
            names,
            f"name one of {', '.join(names)}, or a YAML file",
            "fsdptoys sweep ",
        )
        raise ConfigError(f"{name} is neither a sweep nor KEY=VALUE; {fix}")
    try:
        tree = parse_yaml(read_regular(path, LARGEST_FILE_BYTES))
        definition = build(SweepDefinition, tree)
    except (OSError, ValueError) as mistake:
        raise ConfigError(
            f"{path} cannot be read ({one_line(mistake)}); configs/sweep/debug.yaml is an example"
        ) from mistake
    if bool(definition.grid) == bool(definition.rows) or not all(
        definition.grid.values()
    ):
        raise ConfigError(
            f"{path} must have either rows, or a grid of keys with values; give it one of them"
        )
    return dataclasses.replace(
        definition,
        title=definition.title or path.stem,
        description=" ".join(definition.description.split()),
        grid={
            key: [value_text(value) for value in values]
            for key, values in definition.grid.items()
        },
    )
