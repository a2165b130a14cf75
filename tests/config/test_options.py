"""Options in ``configs/`` and ``docs/options.md`` follow the config dataclasses; settings go
together or not.

Strategies, optimizers and data are known by facts of their classes, not by their names. Refusals
are in ``tests/messages``.
"""

import ast
import dataclasses
import importlib.util
import shutil
import sys
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdptoys
from fsdptoys.cli.main import main
from fsdptoys.config import choices, compose
from fsdptoys.config.choices import list_choices
from fsdptoys.config.compose import compose_config
from fsdptoys.config.named_lists import NAMED_LISTS
from fsdptoys.config.rules import RULES
from fsdptoys.config.schema import SCHEMAS, Config
from fsdptoys.device.kinds import DEVICE_TYPES
from fsdptoys.errors import ConfigError
from fsdptoys.parallel import FSDP2Config
from fsdptoys.parallel.capabilities import Capabilities
from fsdptoys.parallel.context import ContextForm
from fsdptoys.parallel.fsdp import TORCH
from fsdptoys.utils.foreign import parse_yaml
from fsdptoys.utils.options import Declared
from fsdptoys.utils.text import value_text
from scripts import write_options, write_pairs

CONFIGS = Path(__file__).parents[2] / "configs"
HINTS = typing.get_type_hints(Config)


def defaults_of(schema: type) -> list[tuple[str, Any]]:
    """Names and defaults of a dataclass's fields, in order, as plain values."""
    values = []
    for field in dataclasses.fields(schema):
        default = (
            field.default
            if field.default_factory is dataclasses.MISSING
            else field.default_factory()
        )
        values.append(
            (field.name, default.value if isinstance(default, Enum) else default)
        )
    return values


@pytest.mark.parametrize("group", sorted(SCHEMAS.keys() - {"model"}))
def test_files_of_default_groups_list_all_keys_with_their_defaults(group: str) -> None:
    """Oracle: the fields of the dataclasses, in order."""
    for choice, schema in SCHEMAS[group].items():
        tree = parse_yaml(
            (CONFIGS / group / f"{choice}.yaml").read_text(encoding="utf-8")
        )
        assert list(tree.items())[1:] == defaults_of(schema), (
            f"{choice}: run scripts/write_options.py"
        )


def test_experiments_choose_memory_and_mesh_by_file() -> None:
    """Oracle: the YAML files; a key of an experiment would win over ``memory=none`` on the command
    line."""
    for experiment in list_choices()["experiment"]:
        tree = parse_yaml(
            (CONFIGS / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8")
        )
        assert not {"memory", "mesh"} & tree.keys()


def test_config_yaml_lists_all_keys_outside_of_groups_with_their_defaults() -> None:
    """Oracle: the fields of the dataclasses, in order."""
    tree = parse_yaml((CONFIGS / "config.yaml").read_text(encoding="utf-8"))
    list_sections = [name_list.section for name_list in NAMED_LISTS]
    sections = {
        name: HINTS[name]
        for name in HINTS
        if name not in (*SCHEMAS, *list_sections, "patches")
    }
    assert {name: list(tree[name].items()) for name in sections} == {
        name: defaults_of(schema) for name, schema in sections.items()
    }
    assert list(tree)[1:] == [*sections, "patches", "hydra"]


def test_generated_files_are_up_to_date() -> None:
    """Oracle: ``scripts/write_options.py`` would write the same; run it after a change of a config
    dataclass."""
    stale = [
        path
        for path, text in write_options.generated_files().items()
        if path.read_text("utf-8") != text
    ]
    assert stale == []


NAMES = {name for group in ("parallel", "optim", "data") for name in SCHEMAS[group]}
OWNERS = ("parallel", "optim", "data", "toys")
"""Packages that may compare names: their own packages, and ``plan``, which predicts a subset of the
strategies."""


def compared(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each comparison with a literal name, or with a literal collection of
    them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                constants = (
                    side.elts
                    if isinstance(side, (ast.Tuple, ast.List, ast.Set))
                    else [side]
                )
                for constant in constants:
                    if isinstance(constant, ast.Constant) and constant.value in NAMES:
                        yield node.lineno, constant.value


def test_names_are_compared_in_their_own_packages_only() -> None:
    """Oracle: the syntax tree of every file."""
    root = Path(fsdptoys.__file__).parent
    files = [
        path
        for path in root.rglob("*.py")
        if path.relative_to(root).parts[0] not in OWNERS
    ]
    comparisons = [
        (str(path.relative_to(root)), *hit)
        for path in files
        for hit in compared(ast.parse(path.read_text()))
    ]
    assert len(files) > 100
    assert comparisons == []


@pytest.mark.parametrize(
    ("ranks", "device_type", "line"),
    [
        (2, "cpu", ""),
        (96, "cuda", "parallel=fsdp1"),
        (
            2,
            "cuda",
            "parallel=ddp optim=sgd train.deterministic=true optim.implementation=fused",
        ),
        (1, "cpu", "kernels.attention=flash data.mask_documents=true"),
        (1, "cpu", "kernels.attention=math"),
        (1, "cuda", "kernels.attention=cudnn parallel.param_dtype=bfloat16"),
        (1, "cuda", "kernels.attention=efficient data.mask_documents=true"),
        (1, "cuda", "kernels.attention=flash parallel.param_dtype=float16"),
    ],
)
def test_settings_that_go_together_are_accepted(
    ranks: int, device_type: str, line: str
) -> None:
    """Oracle: no error; the settings stay."""
    config = compose_config(line.split())
    attention = config.kernels.attention
    config.validate(ranks, device_type)
    assert attention.value == "auto" or config.kernels.attention is attention


@pytest.mark.parametrize(
    ("cp_size", "form"),
    [(2, ContextForm.ulysses), (4, ContextForm.ulysses), (6, ContextForm.gathered)],
)
def test_heads_are_exchanged_where_ranks_divide_them(
    cp_size: int, form: ContextForm
) -> None:
    """Oracle: four heads."""
    config = compose_config(
        [
            "experiment=null",
            "model=llama_debug",
            f"mesh.cp_size={cp_size}",
            "train.seq_len=96",
        ]
    )
    config.validate(12, "cpu")
    assert isinstance(config.parallel, FSDP2Config) and config.parallel.context is form


@pytest.mark.parametrize(
    ("installed", "fault"),
    [
        (False, "is not installed; run pip install -e '.[torchao]'"),
        (
            True,
            f"cannot be imported with torch {torch.__version__}; install torch 2.11 or newer",
        ),
    ],
    ids=["not installed", "torch too old"],
)
def test_low_bit_states_without_torchao_are_refused(
    installed: bool, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the expected message; torch 2.7 lacks the name that torchao imports."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed or None)
    monkeypatch.delattr(torch.nn.functional, "ScalingType", raising=False)
    with pytest.raises(ConfigError) as caught:
        compose_config(["optim.state_dtype=int4"]).validate(2, "cpu")
    assert str(caught.value) == (
        f"optim.state_dtype=int4 needs the package torchao, which {fault}, or set "
        "optim.state_dtype=bfloat16"
    )


KEY = "memory.gradient_checkpointing"
MODES = {
    "true": "full",
    "on": "full",
    "yes": "full",
    "True": "full",
    "'on'": "full",
    "full": "full",
}
IN_FILES = ("true", "'on'", "off", "full", "none")
MODES |= {
    "false": "none",
    "off": "none",
    "no": "none",
    "OFF": "none",
    "none": "none",
    "selective": "selective",
}


@pytest.mark.parametrize("value", MODES)
def test_booleans_choose_full_or_none_on_the_command_line(value: str) -> None:
    """Oracle: the table above; a recorded configuration contains the choice."""
    assert (
        compose.compose_config([f"{KEY}={value}"]).to_dict()["memory"][
            "gradient_checkpointing"
        ]
        == MODES[value]
    )


def test_booleans_choose_full_or_none_in_yaml_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the same table, in a copy of ``configs/`` with an experiment per value; other values
    are refused."""
    folder = tmp_path / "copied_configs"
    shutil.copytree(choices.CONFIGS, folder)
    for index, value in enumerate([*IN_FILES, "maybe"]):
        text = (
            "# @package _global_\ndefaults: [_self_]\nmemory:\n  "
            f"gradient_checkpointing: {value}\n"
        )
        (folder / "experiment" / f"typed{index}.yaml").write_text(text)
    monkeypatch.setattr(choices, "CONFIGS", folder)
    monkeypatch.setattr(compose, "CONFIG_MODULE", folder.name)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        for index, value in enumerate(IN_FILES):
            config = compose.compose_config([f"experiment=typed{index}"])
            assert config.to_dict()["memory"]["gradient_checkpointing"] == MODES[value]
            assert (
                type(config) is compose.Config
                and type(config.memory) is compose.MemoryConfig
            )
        with pytest.raises(
            ConfigError,
            match=r"Invalid value 'maybe', expected one of \[none, full, selective\]",
        ):
            compose.compose_config([f"experiment=typed{len(IN_FILES)}"])
    finally:
        sys.modules.pop(folder.name, None)


@pytest.mark.parametrize(
    ("line", "fix"),
    {
        "train mine.yml": "write --config mine.yml",
        "train --config_file conf/mine.yaml": "write --config conf/mine.yaml",
        "train experiment=mine.yaml": "write --config mine.yaml",
        "train experiment=conf/cpu_text.yaml": "write experiment=cpu_text",
        "train model=conf/mine.yaml": (
            "copy it to configs/model/mine.yaml and write model=mine"
        ),
        "mine.yaml": "write fsdptoys train --config mine.yaml",
        "train config_file=mine.yaml": "write --config mine.yaml",
    }.items(),
)
def test_file_of_settings_is_answered_with_its_option(
    line: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the option that takes a file, or the folder of the group's own files."""
    assert main(line.split()) == 2
    assert capsys.readouterr().err.endswith(f"{fix}\n")


def test_options_of_one_key_are_declared_alike_and_need_options_that_exist() -> None:
    """Oracle: the fields of every schema; a report knows a key, and not the class that had it."""
    declared: dict[str, set[Declared]] = {}
    for section, hint in HINTS.items():
        for schema in (hint, *SCHEMAS.get(section, {}).values()):
            for field in (
                dataclasses.fields(schema)
                if section != "model" and dataclasses.is_dataclass(schema)
                else ()
            ):
                declared.setdefault(f"{section}.{field.name}", set()).add(
                    field.metadata["option"]
                )
    aliases = [
        alias
        for options in declared.values()
        for option in options
        for alias in option.aliases
    ]
    effects = {
        key: {option[:3] for option in options} for key, options in declared.items()
    }
    assert {key for key, variants in effects.items() if len(variants) > 1} == set()
    needs = {
        need.partition("=")[0]
        for options in declared.values()
        for option in options
        for need in option.needs
    }
    assert needs <= set(declared) and len(aliases) == len(set(aliases))


def test_rules_apply_to_settings_that_exist() -> None:
    """Oracle: attributes and choices of the schemas; a misspelled setting would never hold."""
    schemas = SCHEMAS | {
        section: {"": hint} for section, hint in HINTS.items() if section not in SCHEMAS
    }
    settings = {setting for rule in RULES for setting in rule.settings}
    for setting in settings - {f"launch.device={kind}" for kind in DEVICE_TYPES}:
        key, _, value = setting.replace("!=", "=").partition("=")
        section, _, name = key.partition(".")
        capability = name.removeprefix("capabilities.")
        if capability != name:
            assert hasattr(Capabilities, capability) and value in ("true", "false"), (
                setting
            )
            continue
        if not name:
            assert value in schemas[section], setting
            continue
        kinds = [
            kind
            for kind in schemas[section].values()
            if name in {*dir(kind), *kind.__dataclass_fields__}
        ]
        defaults = [getattr(kind, name, None) for kind in kinds]
        assert defaults, setting
        for default in defaults:
            choices = (
                map(value_text, type(default)) if isinstance(default, Enum) else [value]
            )
            assert not value or value in choices, setting


def test_table_of_capabilities_is_up_to_date() -> None:
    """Oracle: ``scripts/write_pairs.py`` would write the same."""
    if TORCH < (2, 11):
        pytest.skip("FSDP2 keeps no packed weights with this torch")
    page = write_pairs.PAGE.read_text("utf-8")
    assert (
        write_pairs.with_table(
            page, "capabilities", write_pairs.table_of_capabilities()
        )
        == page
    )


@pytest.mark.extended
def test_table_of_pairs_is_what_the_checks_answer() -> None:
    """Oracle: ``scripts/write_pairs.py`` would write the same."""
    pytest.importorskip("torchao")
    if TORCH != (2, 13):
        pytest.skip("schedules and sums depend on the version of torch")
    assert write_pairs.page() == write_pairs.PAGE.read_text("utf-8")
