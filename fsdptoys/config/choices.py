"""Groups of settings, and their choices: the YAML files of ``configs/``."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fsdptoys.register import live_cache, registered
from fsdptoys.utils.foreign import parse_yaml

CONFIGS = Path(__file__).parents[1] / "configs"

Choices = Mapping[str, Sequence[str]]  # group → names of its choices


def list_choices() -> dict[str, list[str]]:
    """Map each group to the sorted names of its YAML files and of the classes that own code has
    registered."""
    return {
        group: sorted(
            {path.stem for path in (CONFIGS / group).glob("*.yaml")}
            | set(registered(group))
        )
        for group in sorted(list_defaults())
    }


@live_cache
def schema_name(group: str, choice: str) -> str:
    """Name of the schema of a group's YAML file: ``llama`` if its defaults begin with
    ``base_llama``; a registered class has its own name."""
    if choice in registered(group):
        return choice
    first = parse_yaml(
        (CONFIGS / group / f"{choice}.yaml").read_text(encoding="utf-8")
    )["defaults"][0]
    return str(first).removeprefix("base_")


def list_defaults() -> dict[str, str | None]:
    """Map each group to its default choice, in the order of ``config.yaml``."""
    entries = parse_yaml((CONFIGS / "config.yaml").read_text(encoding="utf-8"))[
        "defaults"
    ]
    return {
        group: choice
        for entry in entries
        if isinstance(entry, dict)
        for group, choice in entry.items()
    }


def explain_file(word: str, group: str = "experiment", command: str = "") -> str | None:
    """The end of a sentence on a YAML file in place of a setting; None for another word."""
    path = Path(word)
    if path.suffix not in (".yaml", ".yml"):
        return None
    if (CONFIGS / group / f"{path.stem}.yaml").is_file():
        return f"write {command}{group}={path.stem}"
    target = CONFIGS.resolve() / group / f"{path.stem}.yaml"
    return (
        f"files of settings have a folder for each group: copy it to {target} and write "
        f"{command}{group}={path.stem}"
    )
