"""Parts of the help pages read from the YAML files and the source of the config dataclasses,
without torch."""

import re
import textwrap
from pathlib import Path

from fsdptoys.config.choices import list_choices, list_defaults, schema_name
from fsdptoys.config.schema_docs import Declaration, ancestors, collect_keys, read_classes
from fsdptoys.utils.foreign import parse_yaml

PACKAGE = Path(__file__).parents[1]


def plan_settings() -> str:
    """Return the keys that only ``fsdptoys plan`` reads."""
    hardware = ", ".join(
        sorted(path.stem for path in (PACKAGE / "configs" / "hardware").glob("*.yaml"))
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
    for path in sorted((PACKAGE / "configs" / "sweep").glob("*.yaml")):
        description = parse_yaml(path.read_text(encoding="utf-8"))["description"]
        text = f"{path.stem:<14} {' '.join(description.split())}"
        lines += textwrap.wrap(text, 120, initial_indent="    ", subsequent_indent=" " * 19)
    return "\n".join(lines) + "\n"


def train_keys() -> str:
    """All groups, choices and keys, for ``fsdptoys train --help``."""
    return (
        "\n".join(["Groups (the default is marked with *):", *_groups(), "", "Keys:", *_keys()])
        + "\n"
    )


def _groups() -> list[str]:
    choices = list_choices()
    defaults = list_defaults()
    lines = []
    for group, default in defaults.items():
        names = [f"{name}*" if name == default else name for name in choices[group]]
        if default is None:
            names.append("null (default: by hardware)")
        lines.append(f"  {group + '=':<12} {', '.join(names)}")
    return lines


def _keys() -> list[str]:
    classes = read_classes(PACKAGE)
    choices = list_choices()
    lines = []
    roots = []
    for section, annotation, default in classes["Sections"].fields:
        if annotation not in classes:  # a top-level key
            roots.append(f"  {f'{section}={default}':<42} {classes['Sections'].docs[section]}")
            continue
        base = classes[annotation]
        lines += ["", f"{section}: {base.doc}", *_fields(classes, annotation, section)]
        # a file has several
        for name in sorted(classes, key=lambda name: name if name.startswith("Toy") else ""):
            declaration = classes[name]
            if annotation not in ancestors(classes, name):
                continue
            # parallel=fsdp1 selects FSDP1Config, parallel=toy_fsdp ToyFSDPConfig.
            choice = re.sub(r"^toy", "toy_", name.removesuffix("Config").lower())
            if declaration.family:
                presets = ", ".join(
                    preset
                    for preset in choices[section]
                    if schema_name(section, preset) == declaration.family
                )
                heading = f"a {declaration.family} model" + (f" ({presets})" if presets else "")
            elif choice in choices.get(section, ()):
                heading = f"{section}={choice}"
            else:
                continue
            fields = _fields(classes, name, section, without=annotation)
            lines += [f" with {heading}: {declaration.doc}", *fields] if fields else []
    return ["", *roots, *lines] if roots else lines


def _fields(
    classes: dict[str, Declaration], name: str, prefix: str, without: str | None = None
) -> list[str]:
    """Return lines for a class's keys, including inherited ones, without those identical in class
    ``without``."""
    inherited = collect_keys(classes, without) if without else {}
    lines = []
    for key, field in collect_keys(classes, name).items():
        if inherited.get(key) == field:
            continue
        annotation = field.annotation
        doc = field.doc
        if (
            annotation in classes
            and classes[annotation].fields
            and "Enum" not in classes[annotation].bases
        ):
            lines += _fields(classes, annotation, f"{prefix}.{key}")
            continue
        if annotation in classes:
            members = ", ".join(member for member, _, _ in classes[annotation].fields)
            doc = f"{doc} [{members}]"
        elif field.bounds:
            doc = f"{doc} [{field.bounds}]"
        lines.append(f"  {f'{prefix}.{key}={field.default}':<42} {doc}")
    return lines
