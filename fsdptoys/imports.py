"""Import own code that the command line names, and installed packages with an entry point.

``--import my_module`` or ``--import ./mine.py`` runs a module, which registers classes
(``fsdptoys.register``). Packages are found by the entry point group ``fsdptoys``. Nothing that is
read as a file (configurations, checkpoints, run folders) is ever imported: a run records the names
and hashes of its imports as text, and ``explain_missing`` says which to give again.

A file's folder is appended to ``sys.path`` and its module is named by its stem, so that other
processes can unpickle its classes. Child processes load the same code by ``FSDPTOYS_IMPORTS``. The
hash covers the file, or all ``.py`` files of a package, not what they import in turn.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from . import register
from .errors import ConfigError

VARIABLE = "FSDPTOYS_IMPORTS"
"""Environment variable with what children load: modules and absolute paths, joined as in PATH."""

GROUP = "fsdptoys"
"""Entry point group of packages that register classes."""

MOST_RECORDS = 100


@dataclass(frozen=True)
class Import:
    """A loaded module, as a run records it."""

    name: str
    """A module, or the name of a file without its folder."""
    sha256: str

    @property
    def option(self) -> str:
        """The option that loads it."""
        return f"--import {'./' if self.name.endswith('.py') else ''}{self.name}"


_loaded: dict[str, Import] = {}  # module → record
_scanned = False


def load_imports(modules: Sequence[str] = ()) -> None:
    """Import the entry points, what the parent process had, and the given modules and files; each
    once.

    Args:
        modules: names and paths of files, as they follow each ``--import``.

    Raises:
        ConfigError: in one sentence, for a module that is missing, raises or hides another.
    """
    global _scanned
    if not _scanned:
        _load_entry_points()
        _scanned = True
    inherited = [
        word for word in os.environ.get(VARIABLE, "").split(os.pathsep) if word
    ]
    names = [_load(word) for word in (*inherited, *modules)]
    if names:
        os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys(names))


def loaded_imports() -> tuple[Import, ...]:
    """Return the records of what has been loaded, in order."""
    return tuple(_loaded.values())


def record_imports() -> list[dict[str, str]]:
    """Return the root key ``imports`` of a run's ``config.yaml``."""
    return [
        {"name": record.name, "sha256": record.sha256} for record in loaded_imports()
    ]


def read_records(tree: Any) -> tuple[Import, ...]:
    """Read the ``imports`` of a run's ``config.yaml``; what is no record is left out."""
    value = tree.get("imports") if isinstance(tree, dict) else None
    items = value if isinstance(value, list) else []
    return tuple(
        Import(item["name"], item["sha256"])
        for item in items[:MOST_RECORDS]
        if isinstance(item, dict)
        and all(
            isinstance(item.get(key), str) and item[key].isprintable()
            for key in ("name", "sha256")
        )
    )


def import_options() -> list[str]:
    """Return the options with which another process loads the same code."""
    modules = os.environ.get(VARIABLE, "").split(os.pathsep)
    return [part for module in modules if module for part in ("--import", module)]


def explain_missing(tree: Any) -> str | None:
    """Return the end of a sentence on imports of a run that are not loaded; None if all are.

    Args:
        tree: the run's ``config.yaml``.
    """
    names = {record.name for record in loaded_imports()}
    missing = [record for record in read_records(tree) if record.name not in names]
    if not missing:
        return None
    options = " ".join(record.option[:200] for record in missing)
    return (
        "the run used own code, which is never loaded from what a run has written; add "
        f"{options}"
    )


def explain_changed(tree: Any) -> str | None:
    """Return a sentence on imports of a run that have other contents now; None if none has."""
    current = {record.name: record.sha256 for record in loaded_imports()}
    changed = [
        record.name
        for record in read_records(tree)
        if current.get(record.name, record.sha256) != record.sha256
    ]
    if not changed:
        return None
    return (
        f"{', '.join(changed)} has changed since the run recorded its imports; results "
        "may differ"
    )


def _load_entry_points() -> None:
    points = {point.value: point for point in entry_points(group=GROUP)}
    for point in sorted(points.values(), key=lambda point: (point.name, point.value)):
        package = point.dist.name if point.dist is not None else point.module
        where = f"the package {package} (entry point {point.name} = {point.value})"
        _run(point.load, where, "repair or uninstall it")
        _record(point.module, point.module, sys.modules[point.module].__spec__)


def _load(word: str) -> str:
    """Import a module or file; return the word for children."""
    if word.endswith(".py") or os.sep in word:
        return _load_file(word)
    where = f"--import {word}"
    if not all(part.isidentifier() for part in word.split(".")):
        raise ConfigError(
            f"{where} names no module; write a module's name or the path of a .py file"
        )
    if word not in _loaded:
        file = Path(f"{word}.py")
        fix = (
            f"write --import ./{file}"
            if file.is_file()
            else "install its package, or write the path of a .py file"
        )
        module = _run(lambda: importlib.import_module(word), where, fix, missing=word)
        _record(word, word, module.__spec__)
    package = sys.modules[word.partition(".")[0]]
    if package.__file__ is not None:
        file = Path(package.__file__)
        _append(str(file.parents[hasattr(package, "__path__")]))
    return word


def _load_file(word: str) -> str:
    where = f"--import {word}"
    path = Path(os.path.abspath(os.path.expanduser(word)))
    if not path.is_file() or path.suffix != ".py":
        raise ConfigError(
            f"{where} is no Python file; give the path of an existing .py file or the name of a "
            "module"
        )
    stem = path.stem
    if not stem.isidentifier() or os.pathsep in str(path):
        raise ConfigError(
            f"{where} cannot be imported by its name; rename the file to letters, digits and "
            f"underscores, in a folder without {os.pathsep}"
        )
    is_loaded = stem in _loaded and _is_file(sys.modules[stem].__spec__, path)
    if not is_loaded:
        _refuse_hidden(where, stem, path)
    folder = str(path.parent)
    is_new = _append(folder)
    if not is_loaded:
        try:
            module = _run(
                lambda: importlib.import_module(stem), where, "correct it", file=path
            )
        except ConfigError:
            if is_new:
                sys.path.remove(folder)
            raise
        _record(stem, path.name, module.__spec__)
    return str(path)


def _append(folder: str) -> bool:
    """Append a folder to ``sys.path`` unless it is there; return whether it was not.

    The last place hides no installed module. A fork of the launcher leaves out the current
    directory, and its own children unpickle classes of the module.
    """
    is_new = folder not in sys.path
    if is_new:
        sys.path.append(folder)
        importlib.invalidate_caches()
    return is_new


def _refuse_hidden(where: str, stem: str, path: Path) -> None:
    """Refuse a file with the name of another module."""
    module = sys.modules.get(stem)
    try:
        spec = module.__spec__ if module is not None else importlib.util.find_spec(stem)
    except (ImportError, ValueError):  # a module without a spec
        spec = ModuleSpec(stem, None, origin="another module")
    is_namespace = spec is not None and spec.origin is None
    if spec is None or (is_namespace and module is None) or _is_file(spec, path):
        return
    raise ConfigError(
        f"{where} has the name of the module {stem}, which can be imported otherwise "
        f"({spec.origin}); rename the file"
    )


def _is_file(spec: ModuleSpec | None, path: Path) -> bool:
    return (
        spec is not None
        and spec.origin is not None
        and os.path.realpath(spec.origin) == os.path.realpath(path)
    )


def _run(
    load: Callable[[], Any],
    where: str,
    fix: str,
    *,
    missing: str = "",
    file: Path | None = None,
) -> Any:
    """Import a module; a ConfigError in one sentence if it fails, without what it registered."""
    restore = register.snapshot()
    try:
        return load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may also call sys.exit
        restore()
        if isinstance(error, ModuleNotFoundError) and _is_part(error.name, missing):
            raise ConfigError(
                f"{where}: there is no module {error.name}; {fix}"
            ) from error
        if isinstance(error, ConfigError):
            raise ConfigError(f"{where} cannot be loaded: {error}") from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        fix = "correct it" if missing else fix
        raise ConfigError(
            f"{where} cannot be loaded ({reason[:500]}{_location(error, file)}); {fix}"
        ) from error


def _is_part(name: str | None, module: str) -> bool:
    """Whether a missing module is the one to import, or a package around it."""
    return bool(module) and f"{module}.".startswith(f"{name}.")


def _location(error: BaseException, file: Path | None) -> str:
    """Where a module failed: the last line of the file itself, else the last of all."""
    if isinstance(error, SyntaxError):  # its message says it
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if file is not None and frame.filename == str(file)
    ]
    frame = (own or frames)[-1]
    return f" in {Path(frame.filename).name}, line {frame.lineno}"


def _record(module: str, name: str, spec: ModuleSpec | None) -> None:
    _loaded.setdefault(module, Import(name, _hash(spec)))


def _hash(spec: ModuleSpec | None) -> str:
    """SHA-256 of a module's file, or of the names and contents of a package's .py files."""
    digest = hashlib.sha256()
    if spec is not None and spec.submodule_search_locations:
        for folder in map(Path, spec.submodule_search_locations):
            for path in sorted(folder.rglob("*.py")):
                digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    elif spec is not None and spec.origin is not None and Path(spec.origin).is_file():
        digest.update(Path(spec.origin).read_bytes())
    return digest.hexdigest()


def check_same_imports(tree: Any, rank: int) -> None:
    """Check that this rank has loaded the same code as rank 0.

    Args:
        tree: what rank 0 records, with the key ``imports``.
        rank: this rank.

    Raises:
        ConfigError: naming the modules that differ.
    """
    other = set(read_records(tree)) ^ set(loaded_imports())
    if other:
        names = ", ".join(sorted({record.name for record in other}))
        raise ConfigError(
            f"rank {rank} has loaded other code than rank 0 ({names}); give every node the same "
            "--import options and the same files"
        )
