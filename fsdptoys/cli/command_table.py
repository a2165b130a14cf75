"""The commands, their options and their help texts; those of weights and data have own tables.

Nothing here imports torch, so that help is fast.
"""

import argparse
import functools
import re
from typing import Any

from .config_table import add_config_commands, add_config_dir, add_files
from .data_table import add_data_commands
from .help import plan_settings, sweep_lines, train_keys
from .parser import Parser, integer, number
from .weights_table import add_checkpoint_commands, add_weights_commands


def _job(option: str, text: str) -> str:
    if text != "job":
        raise argparse.ArgumentTypeError(
            f"{option}={text} must be job; write {option} job"
        )
    return text


@functools.cache
def make_parsers() -> tuple[Parser, dict[str, Parser]]:
    """Return the root parser, and each command's parser; a command's name may have two words."""
    root = Parser(
        prog="fsdptoys",
        description=(
            "Train a language model from one configuration. Without arguments, fsdptoys train "
            "detects the hardware and\ntrains a model that fits it."
        ),
    )
    commands = root.add_subparsers(
        title="commands", metavar="COMMAND", parser_class=Parser
    )
    parsers: dict[str, Parser] = {}

    def add(
        usages: str, summary: str, description: str = "", **settings: Any
    ) -> Parser:
        name = re.split(r" [^a-z]|\n", usages)[0]
        usage = "\n       ".join(f"fsdptoys {usage}" for usage in usages.splitlines())
        parsers[name] = commands.add_parser(
            name,
            help=summary,
            prog=f"fsdptoys {name}",
            usage=usage,
            description=description,
            **settings,
        )
        parsers[name].value(
            "--import NAME|FILE.py",
            "import own code, which registers models, data, optimizers and more; may be repeated",
            "./mine.py",
        )
        return parsers[name]

    train = add(
        "train [GROUP=CHOICE ...] [KEY=VALUE ...] [--config FILE ...] [--cfg job]",
        "start one rank per device (two on a CPU) and train; under torchrun, run as one of its "
        "ranks",
        page=train_keys,
        strict=False,
    )
    train.value("--cfg job", "print the composed configuration and exit", type=_job)
    add_files(train)

    sweep = add(
        "sweep [NAME] [KEY=VALUE,VALUE ...] [GROUP=CHOICE,CHOICE ...] [options]\ntrain -m ...",
        "train with each combination of settings, and tabulate the results; train -m is the same",
        """\
Train with every combination of the values, each in processes of its own, and print a table of step
time and memory. The settings are those of fsdptoys train, with several values in Hydra's syntax:
a,b or choice(a,b) or range(1,4); quoted text and [lists] are one value. Invalid combinations are
skipped with the reason.
hydra/launcher=submitit_slurm hydra.launcher.KEY=VALUE submits the jobs to SLURM instead of running
them here.
""",
        page=sweep_lines,
        strict=False,
    )
    sweep.flag("--dry-run", "print the jobs and the skipped combinations, and exit")
    sweep.value(
        "--out DIR", "folder of the sweep; default: sweeps/<date>-<time>-<title>"
    )
    sweep.value(
        "--time-limit SECONDS",
        "end a job that takes longer, and continue with the next",
        type=number("number of seconds above 0", "600", lambda seconds: seconds > 0),
    )
    sweep.flag(
        "--resume",
        "resume a sweep, with --resume DIR that folder, without DIR the newest with the same "
        "arguments; finished jobs are not repeated, and arguments given with DIR may add "
        "combinations",
    )
    sweep.value("--resume-dir DIR", argparse.SUPPRESS)
    sweep.flag(
        "--retry",
        "with --resume, repeat jobs that failed, ran out of memory or ran out of time",
    )
    add_files(sweep)
    plan = add(
        "plan [GROUP=CHOICE ...] [KEY=VALUE ...] [--json]",
        "predict memory and time of a run on hardware you do not have",
        """\
Predict memory and time of a run. The settings are those of fsdptoys train; its code runs two steps
on a fake device, without memory or kernels.
""",
        page=plan_settings,
        strict=False,
    )
    plan.flag("--json", "all numbers, for programs")
    add_files(plan)
    search = add(
        "plan search [GROUP=CHOICE ...] [KEY=VALUE ...] [--json] [--png FILE]",
        "find the fastest configuration that fits",
        """\
Try strategies, meshes, checkpointing, chunked loss, offload and batch sizes, and rank those that
fit by tokens/s. Settings given on the command line stay fixed; plan.rows=N sets the number of
printed rows.
""",
        strict=False,
    )
    search.flag("--json", "all numbers, for programs")
    search.value("--png FILE", "plot memory against time")
    add_files(search)
    add(
        "plan calibrate RUN_DIR ... [hardware=NAME] [out=FILE]",
        "fit a hardware profile to measured runs",
        "Fit the efficiencies of a hardware profile to measured runs, and write a profile.\n",
    )

    report = add(
        """\
report PATH ... [--out FILE.html]
report PATH ... --table | --markdown | --csv | --json
report --live RUN_DIR""",
        "write a page or print a table of runs and sweeps, or follow a run",
        """\
Show the results of runs and sweeps. PATH is a run directory, a sweep's folder, or a folder that
contains some.

Rows that differ only in layout or memory switches should have the same losses; the table marks a
row that does not, with the step at which it first differs and the difference.
""",
    )
    report.value(
        "--out FILE.html",
        "path of the page; default: report.html in PATH, or here for several",
    )
    report.forms(
        {
            "--table": "print the table as wide as the terminal",
            "--markdown": "print it as Markdown",
            "--csv": "print one line per row: raw numbers, with units in the column names",
            "--json": "print all that is known of each row",
            "--live": "follow a run, or the running job of a sweep, until it ends or Ctrl-C",
        }
    )

    compare = add(
        "compare RUN_A RUN_B [--tolerance X]",
        "find the first step at which two runs differ, and the settings that could explain it",
        """\
Compare losses, gradient norms, learning rates and valid tokens of two runs step by step. Print the
first step at which each differs and by how much, and the settings and versions that differ, the
most likely cause first. A run is its directory, or the folder of a sweep's job.

Exit status: 0 if both have the same steps with equal values, 1 if not, 2 after a mistake.
""",
    )
    compare.value(
        "--tolerance X",
        "relative difference up to which two numbers count as equal; default: 0, equal in "
        "every bit",
        "1e-6",
        default=0.0,
        type=number(
            "finite number of at least 0, relative to the larger of two values",
            "1e-6, or leave it out for every bit",
            lambda value: value >= 0,
        ),
    )

    verify = add(
        "verify FOLDER_OR_MODEL [KEY=VALUE ...] [options]",
        "prove on this machine that sharding changes nothing for a model",
        """\
Train a small form of a model in one process with a loop in plain PyTorch, then under strategies,
layouts and memory switches, and print how far each is from the plain loop: equal in every bit,
within measured rounding, or different, with the first tensor and step. Combinations that the model
does not admit are refused with the reason.

FOLDER_OR_MODEL is a model preset, a folder with a config.json, or an own model (--import).
Settings are those of fsdptoys train. A row that sets one of them to another value is left out.
The ranks are CPU processes, unless launch.device names an accelerator.

Exit status: 0 if nothing differs, 1 if a row differs or fails, 2 after a mistake.
""",
    )
    verify.value(
        "--rows NAMES",
        "rows to train, separated by commas: usual, all, or names of the table; default: usual",
        "fsdp2,tp",
        default="usual",
    )
    verify.value(
        "--ranks N",
        "most ranks of a row, up to 8; default: 4, or the accelerators here",
        "8",
        type=integer(4, least=1),
    )
    verify.flag("--full", "keep layers, widths and vocabulary of the model")
    verify.flag("--json", "all numbers, for programs")
    verify.value("--out FILE", "also write a page: FILE.md or FILE.html", "verify.md")

    models = add(
        "models [NAME ...] [--json]",
        "list parameters, active parameters and FLOPs per token of the model presets",
        """\
List the model presets, or the named ones: family, parameters, layers, context and FLOPs per token,
counted on models without memory.
""",
    )
    models.flag("--json", "exact numbers, as a list of objects")
    add_config_dir(models)

    add(
        "new KIND NAME",
        "write a small working file of own code, and its test",
        """\
Write NAME.py and test_NAME.py into this folder. KIND is one of model, data, optimizer, loss,
strategy, writer and callback. fsdptoys train --import ./NAME.py uses the file as it is; change it.
""",
    )
    add_weights_commands(add)
    add_data_commands(add)
    add_checkpoint_commands(add)
    add_config_commands(add)

    usages = [
        re.sub(r"fsdptoys train -m \.\.\.", "", parser.usage or "").strip()
        for parser in parsers.values()
    ]
    root.usage = "\n       ".join([*usages, "fsdptoys --version"])
    return root, parsers
