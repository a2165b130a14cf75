"""Imports and registrations: what they accept, and the sentence for what they refuse."""

import re
from pathlib import Path

import pytest

from fsdptoys.config.compose import compose_config
from fsdptoys.config.declared_options import declared_options
from fsdptoys.errors import ConfigError
from fsdptoys.imports import check_same_imports, load_imports, record_imports
from fsdptoys.optim import OPTIMIZERS
from fsdptoys.register import registered
from fsdptoys.utils.options import Effect
from tests.harness.own_code import forgotten_imports, write_code

HEAD = """
from enum import Enum
from fsdptoys import register
from fsdptoys.optim import OptimConfig, SGDConfig
from fsdptoys.data import DataConfig
"""
CLASS = 'class Own(SGDConfig):\n    """Own."""\n'
WRONG = {
    "missing_default": (CLASS + "    gain: float", r"Own cannot be a dataclass \("),
    "odd_type": (
        CLASS + "    gain: dict[str, int] = None",
        "Own.gain has the type dict[str, int], which no option can have; use bool,",
    ),
    "odd_default": (
        CLASS + "    gain: int = 0.5",
        "Own.gain has the default 0.5, which is no int; correct the type or the default",
    ),
    "unknown_type": (
        CLASS + "    gain: 'Gain' = 1",
        "Own has a field with a type that cannot be read (name 'Gain' is not defined)",
    ),
    "untyped": (
        CLASS + "    momentum = 0.5",
        "Own.momentum=0.5 has no type, and would not change the option's default; write "
        "momentum: float = 0.5",
    ),
    "named": (
        CLASS + "    name: str = 'x'",
        'Own.name is set by register.optimizer("own"); leave the field out',
    ),
    "abstract": (
        "class Own(OptimConfig):\n    pass",
        "Own lacks build, state_widths, which every OptimConfig has; define them as",
    ),
    "other_base": (
        "class Own(DataConfig):\n    pass",
        'register.optimizer("own") needs a class that derives from OptimConfig of '
        "fsdptoys.optim, which Own does not; write class Own(OptimConfig)",
    ),
    "a_function": (
        "def own():\n    pass",
        'register.optimizer("own") takes a class, not <function',
    ),
}
NAMES = {
    "taken": (
        "muon",
        "takes a name that a built-in one has; use another one than muon",
    ),
    "a_word": ("null", "needs a name of small letters, digits and underscores"),
    "a_path": ("a/b", "needs a name of small letters, digits and underscores"),
    "a_schema": ("base_own", "needs a name of small letters, digits and underscores"),
}


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Import within the test's own folder, and forget it."""
    monkeypatch.chdir(tmp_path)
    with forgotten_imports():
        yield


def refusal(word: str) -> str:
    """The message of an import that is refused."""
    with pytest.raises(ConfigError) as caught:
        load_imports([word])
    assert str(caught.value).isprintable()
    return str(caught.value)


@pytest.mark.parametrize("name", WRONG)
def test_class_that_is_no_configuration_is_refused(name: str) -> None:
    """Oracle: the sentence; nothing is registered."""
    source, sentence = WRONG[name]
    decorator = '@register.optimizer("own")\n'
    Path(f"{name}.py").write_text(f"{HEAD}\n{decorator}{source}\n")
    message = refusal(f"./{name}.py")
    assert message.startswith(f"--import ./{name}.py cannot be loaded: ")
    assert sentence in message or re.search(sentence, message), message
    assert "own" not in OPTIMIZERS


@pytest.mark.parametrize("case", NAMES)
def test_name_that_cannot_be_chosen_is_refused(case: str) -> None:
    """Oracle: the sentence; nothing is registered."""
    name, sentence = NAMES[case]
    Path(f"{case}.py").write_text(f'{HEAD}\n@register.optimizer("{name}")\n{CLASS}')
    assert sentence in refusal(f"./{case}.py")
    assert not registered("optim")


def test_name_that_other_own_code_has_is_refused() -> None:
    """Oracle: the sentence, which names the class; the first one stays."""
    for file in ("first", "second"):
        Path(f"{file}.py").write_text(f'{HEAD}\n@register.optimizer("own")\n{CLASS}')
    load_imports(["./first.py"])
    assert "takes a name that class Own of first has" in refusal("./second.py")
    assert OPTIMIZERS["own"].__module__ == "first"


def test_file_that_cannot_be_imported_is_named_with_the_line() -> None:
    """Oracle: one sentence for each way to fail."""
    sources = {
        "raising": "x = 1\nx / 0",
        "exiting": "import sys\nsys.exit(3)",
        "lacking": "import a_module_that_is_missing",
        "broken": "def (",
    }
    for name, source in sources.items():
        Path(f"{name}.py").write_text(source)
    Path("json.py").write_text("")
    Path("two-arguments.py").write_text("")
    sentences = {
        "./raising.py": r"\(ZeroDivisionError: division by zero in raising.py, line 2\); correct",
        "./exiting.py": r"\(SystemExit: 3 in exiting.py, line 2\); correct it",
        "./lacking.py": "No module named 'a_module_that_is_missing' in lacking.py, line 1",
        "./broken.py": r"\(SyntaxError: .*broken.py, line 1.*\); correct it",
        "./absent.py": "--import ./absent.py is no Python file; give the path of an existing",
        "./": "--import ./ is no Python file",
        "absent": "--import absent: there is no module absent; install its package, or",
        "raising": r"there is no module raising; write --import ./raising.py",
        "a_package.absent": "there is no module a_package;",
        "./json.py": r"has the name of the module json, which can be imported otherwise \(",
        "./two-arguments.py": "cannot be imported by its name; rename the file to letters",
        "two-arguments": "names no module; write a module's name or the path of a .py file",
    }
    for word, sentence in sentences.items():
        assert re.search(sentence, refusal(word)), word
    assert record_imports() == []


def test_a_second_load_executes_nothing() -> None:
    """Oracle: a line that each execution adds to a file, and the records."""
    Path("once.py").write_text("open('lines', 'a').write('x')")
    load_imports(["./once.py"])
    load_imports(["once.py", str(Path("once.py").absolute())])
    load_imports()  # of the variable
    assert Path("lines").read_text() == "x"
    assert [record["name"] for record in record_imports()] == ["once.py"]


def test_entry_points_are_imported_without_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a distribution's metadata as pip writes them, and the sentence for a broken one."""
    write_code(tmp_path)
    folder = tmp_path / "plugin-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n"
    )
    (folder / "entry_points.txt").write_text("[fsdptoys]\nmine = copied\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    load_imports()
    assert "copied" in OPTIMIZERS
    assert record_imports()[0]["name"] == "copied"
    monkeypatch.setattr("fsdptoys.imports._scanned", False)
    (folder / "entry_points.txt").write_text("[fsdptoys]\nmine = absent_module\n")
    with pytest.raises(
        ConfigError, match=r"the package plugin .* repair or uninstall it"
    ):
        load_imports()


def test_fields_of_a_registered_class_are_options(tmp_path: Path) -> None:
    """Oracle: the composed values, the refusals with a fix, and the declarations."""
    write_code(tmp_path)
    load_imports(["./copied.py"])
    config = compose_config(["optim=copied", "optim.beta2=0.5", "optim.lr=1"])
    assert (config.optim.name, config.optim.lr) == ("copied", 1.0)
    assert config.to_dict()["optim"]["beta2"] == 0.5
    assert config.to_dict()["imports"] == record_imports()
    assert declared_options()["optim.beta2"].effect is Effect.training
    for arguments, sentence in {
        "optim=copyed": "did you mean optim=copied?",
        "optim=copied optim.beta3=1": "did you mean optim.beta2=1?",
        "optim=copied optim.beta2=high": "must be a finite number; set optim.beta2=0.95",
        "optim=copied optim.momentum=1": "is not an option of optim=copied; set optim=",
        "optim=copied optim.lr=-1": "optim.lr=-1.0 must be at least 0; set optim.lr=0",
        "optim=copied optim.implementation=fused": "which has one; set",
        "optim=other": "or add the --import of the code that registers other",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            compose_config(arguments.split())


def test_ranks_with_other_code_are_refused(tmp_path: Path) -> None:
    """Oracle: the sentence, for another hash and for a missing import."""
    write_code(tmp_path)
    first = {"imports": [{"name": "copied.py", "sha256": "0" * 64}]}
    for loaded in ([], ["./copied.py"]):
        load_imports(loaded)
        with pytest.raises(ConfigError, match=r"rank 1 .* than rank 0 \(copied.py\)"):
            check_same_imports(first, 1)
    check_same_imports({"imports": record_imports()}, 1)
