"""The commands ``config`` and ``completion``, and the options of files that others share."""

from .parser import AddCommand, Parser

SOURCES = """
A and B are a YAML file, a run's folder, or settings in quotes, as 'model=llama_debug optim=muon'.
Exit status: 0 if both are the same, 1 if not, 2 after a mistake.
"""


def add_files(parser: Parser) -> None:
    """Add the options of files, which every command that takes settings has."""
    parser.value(
        "--config FILE",
        "settings of a YAML file, or of a run's folder; may be repeated, and settings on the "
        "command line win",
        "mine.yaml",
        action="append",
        default=[],
    )
    add_config_dir(parser)


def add_config_dir(parser: Parser) -> None:
    """Add ``--config-dir``, which ``main`` takes from every command."""
    parser.value(
        "--config-dir DIR",
        "folder with own files of groups, as DIR/model/mine.yaml; may be repeated; ./configs "
        "is one",
        "configs",
        action="append",
    )


def add_config_commands(add: AddCommand) -> None:
    """Add the parts of ``config``, and ``completion``."""
    show = add(
        "config show [GROUP=CHOICE ...] [KEY=VALUE ...] [--config FILE ...]",
        "print every setting of a run with the origin of its value",
        "Print the configuration of fsdptoys train --cfg job, and where each value comes from.\n",
        strict=False,
    )
    add_files(show)
    add_config_dir(
        add(
            "config cp GROUP/NAME [TO]",
            "copy a file of a group into ./configs, to edit it",
            """\
Copy a built-in file, as model/llama_debug, to configs/GROUP/TO.yaml; fsdptoys train GROUP=TO takes
the copy. TO is a name, by default my_NAME. GROUP may also be hardware or sweep.
""",
        )
    )
    add_config_dir(
        add(
            "config diff A B",
            "list the settings in which two files, runs or command lines differ",
            f"List the settings that differ, with both values.\n{SOURCES}",
        )
    )
    schema = add(
        "config schema [GROUP] [--out FILE]",
        "print a JSON schema of configuration files, for editors",
        """\
Print the JSON schema of files for --config, or of the files of a group, of hardware or of sweep:
types, choices, bounds and meanings of all keys. VS Code's YAML extension reads it from a comment
atop a file: # yaml-language-server: $schema=schema.json
""",
    )
    schema.value("--out FILE", "write it to a file instead", "schema.json")
    add_config_dir(schema)
    add(
        "completion SHELL",
        "print a script that completes commands, options, keys and values in bash, zsh or fish",
        """\
Print a script for SHELL, which is bash, zsh or fish:
    bash   source <(fsdptoys completion bash), in ~/.bashrc
    zsh    source <(fsdptoys completion zsh), in ~/.zshrc after compinit
    fish   fsdptoys completion fish > ~/.config/fish/completions/fsdptoys.fish
""",
    )
