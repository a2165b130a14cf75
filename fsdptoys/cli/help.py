"""Parts of the help pages that are read from files, without torch."""

import textwrap
from pathlib import Path

from fsdptoys.config.choices import list_choices, list_defaults
from fsdptoys.register import CONFIGS, KINDS, own_fields, registered
from fsdptoys.utils.foreign import parse_yaml
from fsdptoys.utils.option_docs import read_docs
from fsdptoys.utils.options import default_of
from fsdptoys.utils.text import value_text


def plan_settings() -> str:
    """Return the keys that only ``fsdptoys plan`` reads."""
    hardware = ", ".join(
        sorted(path.stem for path in (CONFIGS / "hardware").glob("*.yaml"))
    )
    return f"""\
settings:
  plan.hardware=NAME      {hardware}, or a YAML file like those of
                          configs/hardware
  plan.world_size=N       number of ranks; default: one node of that hardware
  plan.memory_gib=X       usable memory of a device; default: all of it
  plan.allocator=native   PyTorch's default segments instead of expandable ones
"""


def sweep_lines() -> str:
    """Return the names and descriptions of the shipped sweeps."""
    lines = [
        "NAME, one of these or a YAML file like those of configs/sweep; settings after it "
        "override its own:"
    ]
    for path in sorted((CONFIGS / "sweep").glob("*.yaml")):
        description = parse_yaml(path.read_text(encoding="utf-8"))["description"]
        text = f"{path.stem:<14} {' '.join(description.split())}"
        lines += textwrap.wrap(
            text, 120, initial_indent="    ", subsequent_indent=" " * 19
        )
    return "\n".join(lines) + "\n"


def train_keys() -> str:
    """Return all groups, choices and keys; ``scripts/write_options.py`` writes the keys."""
    choices = list_choices()
    lines = ["Groups (the default is marked with *):"]
    for group, default in list_defaults().items():
        names = [f"{name}*" if name == default else name for name in choices[group]]
        if default is None:
            names.append("null (default: by hardware)")
        lines.append(f"  {group + '=':<12} {', '.join(names)}")
    keys = Path(__file__).with_name("train_keys.txt").read_text(encoding="utf-8")
    return "\n".join([*lines, "", "Keys:", "", keys, *own_lines()])


def own_lines() -> list[str]:
    """Return the options of registered classes, with the docstrings of their source."""
    lines = []
    for kind in KINDS.values():
        for name, schema in registered(kind.group).items():
            docs = read_docs(schema)
            lines += [
                f" with {kind.group}={name}: {docs.doc}",
                *(
                    f"  {f'{kind.group}.{field.name}={text}':<42} {docs.fields.get(field.name, '')}"
                    for field in own_fields(schema)
                    if (text := value_text(default_of(field), quote=True))
                ),
            ]
    return ["Of own code:", "", *lines, ""] if lines else []
