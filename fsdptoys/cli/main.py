"""The command line: ``fsdptoys``, ``python -m fsdptoys`` and ``torchrun -m fsdptoys``.

Every user mistake ends with one sentence on stderr and status 2. Imports are deferred so that help
is fast.
"""

import gc
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

from fsdptoys import __version__
from fsdptoys.errors import ConfigError
from fsdptoys.launch.exit_record import ExitRecord, write_exit_record
from fsdptoys.utils.console_stream import install_streams, let_stdout_end, lost_output
from fsdptoys.utils.text import near_miss, print_status

from .config_dirs import take_config_dirs
from .system_errors import (
    check_current_folder,
    explain_autoload,
    explain_environment,
)

BROKEN_PIPE = 141
"""Exit status when the reader has closed the pipe, the same as for SIGPIPE."""

IMPORT = "--import"
MISSPELLED = ("-import", "-imports", "--imports", "--import-module")

MULTIRUN = ("-m", "--multirun")
"""Hydra's own options for a sweep."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: arguments after the program's name; None for those of this process.

    Returns:
        Exit status: 0, 1 after a failure, 2 after a mistake, 128 + number after a signal.
    """
    install_streams()
    argv = list(sys.argv[1:] if argv is None else argv)
    worker = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if worker:
        # Die of Ctrl-C at once, even inside a collective; the launcher waits for it and prints the
        # message.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        status = _run(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except ConfigError as error:
        return _report_mistake(str(error), worker)
    except (RuntimeError, OSError, MemoryError, ValueError) as error:
        reason = lost_output().get("stdout") if isinstance(error, OSError) else None
        if reason is not None:
            if isinstance(error, BrokenPipeError):  # as of | head
                return BROKEN_PIPE
            print_status(
                f"stdout cannot be written ({reason}); the output is incomplete"
            )
            return 1
        # Any command may be the first to import torch, so its errors are handled here.
        sentence = explain_autoload(error) or explain_environment(error)
        if sentence is None:
            raise
        # A full disk or memory is a failure (1); a wrong environment variable is a mistake (2).
        passes = isinstance(error, (OSError, MemoryError)) and not isinstance(
            error, FileNotFoundError
        )
        return _report_mistake(sentence, worker, 1 if passes else 2)
    except KeyboardInterrupt:
        print("fsdptoys: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        let_stdout_end()  # the interpreter's final flush exits with status 120 on failure


def _report_mistake(sentence: str, worker: bool, status: int = 2) -> int:
    print_status(sentence.replace("\n", "\\n"))  # line breaks of a typed value
    if not worker:
        write_exit_record(ExitRecord(status, sentence))
    return status


def _explain_missing_command(word: str, later: list[str]) -> str:
    """Return the message for a first argument that is not a command, with the line to type."""
    from .command_table import make_parsers
    from .commands import command_names

    key, equals, value = word.partition("=")
    option = key if key.startswith("-") else None
    if word == "version":
        return f"{word} is not a command; write fsdptoys --version"
    if option is None and not equals and (near := near_miss(word, command_names())):
        return f"{word} is not a command; did you mean fsdptoys {near}?"
    check_current_folder()
    from fsdptoys.config.choices import explain_file
    from fsdptoys.config.fixes import find_fix
    from fsdptoys.config.overrides import without_dashes

    if (
        option is None
        and not equals
        and (file := explain_file(word, command="fsdptoys train "))
    ):
        return f"{word} is a file and not a command; {file}"
    fix = find_fix(key.lstrip("-"), value if equals else None, {})
    takers = [
        name for name, parser in make_parsers()[1].items() if option in parser.examples
    ]
    if option in ("-c", *MULTIRUN) or (fix is None and takers):
        command = f"fsdptoys {(takers or ['train'])[0]}"
        return f"{word} is an option of {command}; write {command} {' '.join([word, *later])}"
    if option is not None:
        return without_dashes(word, later, {}, "fsdptoys train ")
    if fix is None or (not equals and fix.verb):
        return (
            f"{word} is not a command; write fsdptoys train{f' {word}' * bool(equals)}"
        )
    return f"{word} is not a command; {fix.clause('write', 'fsdptoys train ')}"


def _run(argv: list[str]) -> int:
    if argv[:1] == ["completion"] and argv[1:2] not in ([], ["-h"], ["--help"]):
        from .completion import completion_command

        return completion_command(argv[1:])
    argv, imports = take_imports(argv)
    if argv[:1] == ["--version"]:
        print(f"fsdptoys {__version__}")
        return 0
    from .commands import command_names, help_page

    if not argv or argv[0] in ("-h", "--help", "help"):
        print(help_page(), end="")
        return 0
    command = argv[0]
    argv = argv[1:]
    if command not in command_names():
        raise ConfigError(_explain_missing_command(command, argv))
    if command == "sweep" or (
        command == "train" and any(word in MULTIRUN for word in argv)
    ):
        command = "sweep"
        argv = [word for word in argv if word not in MULTIRUN]
    argv = take_config_dirs(command, argv)
    is_help = any(word in ("-h", "--help") for word in argv) or not (
        argv or command in ("train", "plan", "models")
    )
    if imports or not is_help:
        check_current_folder()  # PyTorch cannot be imported without one
    _load_imports(imports)
    if is_help:
        print(help_page(command), end="")
        return 0
    if command == "sweep":
        let_stdout_end()
    module = _import(f"{__package__}.{'report' if command == 'compare' else command}")
    status: int = getattr(module, f"{command}_command")(argv)
    return status


def take_imports(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into those without ``--import``, and what follows each of these.

    Raises:
        ConfigError: for one without a value, or a misspelled one.
    """
    rest = []
    imports = []
    queue = list(argv)
    while queue:
        word = queue.pop(0)
        option, equals, value = word.partition("=")
        if option in MISSPELLED:
            raise ConfigError(f"{option} is not an option; did you mean {IMPORT}?")
        if option != IMPORT:
            rest.append(word)
            continue
        if not equals and queue and not queue[0].startswith("-"):
            value = queue.pop(0)
        if not value:
            raise ConfigError(f"{IMPORT} has no value; write {IMPORT} ./mine.py")
        imports.append(value)
    return rest, imports


def _load_imports(modules: Sequence[str]) -> None:
    """Load own code without garbage collection, since it may import torch."""
    from fsdptoys.imports import load_imports

    gc.disable()
    try:
        load_imports(modules)
    finally:
        gc.freeze()
        gc.enable()


def _import(name: str) -> ModuleType:
    """Import a command without garbage collection, which takes a tenth of the time: what is
    imported stays."""
    if name in sys.modules:
        return sys.modules[name]
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()
