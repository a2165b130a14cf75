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
from fsdptoys.utils.foreign import parse_yaml
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.text import one_line, suggestion

SWEEPS = Path(__file__).parents[1] / "configs" / "sweep"
LARGEST_FILE_BYTES = 2**20


@dataclass(frozen=True)
class SweepDefinition:
    """Content of a sweep's file."""

    title: str
    """Short title, part of the folder's name."""
    description: str = ""
    """Purpose of the comparison."""
    base: tuple[str, ...] = ()
    """Words of all jobs."""
    grid: dict[str, list[str]] = field(default_factory=dict)
    """Key → values; all combinations are run, the last key varying fastest."""
    rows: tuple[tuple[str, ...], ...] = ()
    """Words of each job, instead of a grid."""
    time_limit_seconds: float | None = None
    """Time limit of one job; null for none."""


def list_sweeps() -> dict[str, str]:
    """Return the name and description of each sweep of the package."""
    return {
        path.stem: read_definition(path.stem).description for path in sorted(SWEEPS.glob("*.yaml"))
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
            name, names, f"name one of {', '.join(names)}, or a YAML file", "fsdptoys sweep "
        )
        raise ConfigError(f"{name} is neither a sweep nor KEY=VALUE; {fix}")
    try:
        tree = parse_yaml(read_regular(path, LARGEST_FILE_BYTES))
    except (OSError, ValueError) as mistake:
        raise ConfigError(f"{path} cannot be read ({one_line(mistake)}); correct it") from mistake
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} must be a mapping with grid or rows; see configs/sweep/debug.yaml for an "
            "example"
        )
    return _build(tree, path)


def _build(tree: dict[str, Any], path: Path) -> SweepDefinition:
    names = [field.name for field in dataclasses.fields(SweepDefinition)]
    for key in tree:
        if key not in names:
            fix = suggestion(str(key), names, f"it may have {', '.join(names)}")
            raise ConfigError(f"{path} says {key}, which no sweep has; {fix}")
    if ("grid" in tree) == ("rows" in tree):
        number = "both" if "grid" in tree else "neither"
        raise ConfigError(f"{path} has {number} of grid and rows; give it one of them")
    for key in ("title", "description"):
        if key in tree and not isinstance(tree[key], str):
            raise ConfigError(
                f"{path} says {key}={tree[key]}, which must be text; put quotes around it"
            )
    limit = tree.get("time_limit_seconds")
    if limit is not None and not (type(limit) in (int, float) and 0 < limit < float("inf")):
        raise ConfigError(
            f"{path} says time_limit_seconds={limit}, which must be a number above 0; set it to 600"
        )
    return SweepDefinition(
        title=tree.get("title", path.stem),
        description=" ".join(tree.get("description", "").split()),
        base=_words(tree.get("base", []), path, "base"),
        grid=_grid(tree["grid"], path) if "grid" in tree else {},
        rows=_rows(tree["rows"], path) if "rows" in tree else (),
        time_limit_seconds=float(limit) if limit is not None else None,
    )


def _rows(rows: Any, path: Path) -> tuple[tuple[str, ...], ...]:
    if not isinstance(rows, list) or not rows:
        raise ConfigError(
            f"{path} says rows={rows}, which must be a list of lists of words; write one list "
            "for each job"
        )
    return tuple(_words(row, path, f"rows[{index}]") for index, row in enumerate(rows))


def _words(words: Any, path: Path, where: str) -> tuple[str, ...]:
    if not isinstance(words, list):
        raise ConfigError(
            f"{path} says {where}={words}, which must be a list of words; write [KEY=VALUE, …]"
        )
    for word in words:
        if not isinstance(word, str) or "=" not in word:
            raise ConfigError(
                f"{path} says {word} in {where}, which must be a word KEY=VALUE; correct it"
            )
    return tuple(words)


def _grid(grid: Any, path: Path) -> dict[str, list[str]]:
    if not isinstance(grid, dict) or not grid:
        raise ConfigError(
            f"{path} says grid={grid}, which must map keys to lists of values; write KEY: "
            "[VALUE, …]"
        )
    for key, values in grid.items():
        if not isinstance(key, str) or not isinstance(values, list) or not values:
            raise ConfigError(
                f"{path} says {key}={values} in grid, which must be a list of values; write "
                f"{key}: [VALUE, …]"
            )
    return {key: [_as_typed(value, path, key) for value in values] for key, values in grid.items()}


def _as_typed(value: Any, path: Path, key: str) -> str:
    """Format a value of the file as on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(_as_typed(element, path, key) for element in value)}]"
    if isinstance(value, (int, float, str)):
        return str(value)
    raise ConfigError(
        f"{path} says {key}={value} in grid, which must be a word, a number or a list; correct it"
    )
