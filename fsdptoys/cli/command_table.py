"""The commands, their options and their help texts.

Nothing here imports torch, so that help is fast.
"""

import argparse
import functools
import re
from typing import Any

from .help import plan_settings, sweep_lines, train_keys
from .parser import Parser, integer, number


def _job(option: str, typed: str) -> str:
    if typed != "job":
        raise argparse.ArgumentTypeError(
            f"{option}={typed} must be job; write {option} job"
        )
    return typed


SOURCE = """
RUN_OR_DIR is the directory of a run with final weights (checkpoint.final_weights=true) or
checkpoints, a checkpoint's folder or URL, or a folder in Hugging Face format: config.json and
safetensors files. The model must fit one device.
"""


def _add_model_options(parser: Parser) -> None:
    """Add the options of commands that use a trained model."""
    parser.value(
        "--context N",
        "maximum context in tokens, at most model.max_seq_len; default: train.seq_len of the "
        "run, or the folder's own",
        "1024",
        type=integer(1),
    )
    parser.value(
        "--tokenizer T",
        "bytes, ids (the text is numbers separated by spaces), or a tokenizer.json or its "
        "folder; default: that of the folder or of the run's data",
        "bytes",
    )
    parser.value(
        "--adapter DIR",
        "folder in PEFT's format, whose low-rank adapters are added to the weights",
        "runs/NAME/adapter",
    )
    parser.value(
        "--device D", "cuda, npu or cpu; default: an accelerator if there is one", "cpu"
    )
    parser.value(
        "--dtype D",
        "dtype of the weights: float32 (default), bfloat16 or float16",
        "bfloat16",
        default="float32",
    )


def _add_chat_words(parser: Parser) -> None:
    """Add how text or conversations are read, for ``data prepare`` and ``data show``."""
    parser.value("--tokenizer T", "bytes, or a tokenizer.json or its folder", "bytes")
    parser.value(
        "--document-end TOKEN",
        "token that ends each document; default: the tokenizer's; 0 for bytes",
    )
    parser.value(
        "--field NAME",
        "field of records and tables with the text; default: text, or messages with --chat",
        "body",
    )
    parser.flag(
        "--chat", "records are conversations, as for data=chat: only answers are labels"
    )
    parser.value(
        "--template T",
        "with --chat: chatml, or a Jinja file; default: the tokenizer's own",
        "chatml",
    )


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
        return parsers[name]

    train = add(
        "train [GROUP=CHOICE ...] [KEY=VALUE ...] [--cfg job]",
        "start one rank per device (two on a CPU) and train; under torchrun, run as one of its "
        "ranks",
        page=train_keys,
        strict=False,
    )
    train.value("--cfg job", "print the composed configuration and exit", type=_job)

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

    models = add(
        "models [NAME ...] [--json]",
        "list parameters, active parameters and FLOPs per token of the model presets",
        """\
List the model presets, or the named ones: family, parameters, layers, context and FLOPs per token,
counted on models without memory.
""",
    )
    models.flag("--json", "exact numbers, as a list of objects")

    add(
        "convert to-hf RUN OUT_DIR [dtype=float32|bfloat16|float16] [tokenizer=DIR] [adapter=DIR]",
        "write a run's weights in Hugging Face format",
        """\
Write the final weights of a run (checkpoint.final_weights=true) or those of a checkpoint in Hugging
Face format. RUN is the run's directory, its folder weights, or a checkpoint's folder or URL;
OUT_DIR must not exist. The files of a tokenizer, its chat template included, are copied from the
folder DIR. With adapter=DIR, a folder in PEFT's format, its low-rank adapters are added to the
weights, and RUN may be a folder in Hugging Face format.
""",
    )
    add(
        "convert from-hf DIR",
        "check such a folder, and print the command that trains from it",
        "Check every value of a folder in Hugging Face format, and print the command that "
        "trains from it.\n",
    )

    generate = add(
        "generate RUN_OR_DIR --prompt TEXT [--prompt TEXT ...] [options]",
        "continue a prompt with a run's weights, or those of a folder in Hugging Face format",
        f"""\
Print each prompt and the model's continuation, and the speed to stderr. Text ends with the folder's
eos_token_id, if it has one.
{SOURCE}""",
    )
    generate.value(
        "--prompt TEXT",
        "text to continue; may be repeated",
        "TEXT, or --prompt=--x for one with dashes",
        action="append",
        default=[],
    )
    generate.any_text.add("--prompt")
    generate.flag(
        "--chat",
        "each prompt is a user's message, to which the chat template has the model answer",
    )
    generate.value(
        "--system TEXT",
        "with --chat: the system's message before each prompt",
        "'Answer briefly.'",
    )
    generate.any_text.add("--system")
    generate.value(
        "--tokens N",
        "tokens to add; default: 200",
        "200",
        type=integer(200),
        default=200,
    )
    generate.value(
        "--temperature X",
        "divides the logits; default: 1; 0 takes the most likely token",
        "0.8",
        default=1.0,
        type=number("number of at least 0", "1", lambda value: value >= 0),
    )
    generate.value(
        "--top-k N", "sample from the N most likely tokens", "50", type=integer(1)
    )
    generate.value(
        "--top-p X",
        "sample from the fewest most likely tokens with this total probability",
        "0.9",
        type=number("number above 0 and at most 1", "1", lambda value: 0 < value <= 1),
    )
    generate.value(
        "--seed N", "seed of each prompt's samples; default: 0", "1", type=integer(0, 0)
    )
    _add_model_options(generate)
    generate.flag("--json", "prompts, texts and added ids, as a list of objects")

    evaluate = add(
        "evaluate RUN [options]\nevaluate RUN_OR_DIR --text FILE [options]",
        "loss and perplexity of such a model on a text, or on its run's held-out data",
        f"""\
Print the model's loss in nats per token, perplexity and bits per byte on its run's held-out data,
or on a text, in independent windows of --context tokens.
{SOURCE}""",
    )
    evaluate.value(
        "--text FILE",
        "text, of which all tokens but the first are predicted; default: held-out data",
    )
    evaluate.value(
        "--windows N",
        "use the first N held-out windows; default: all",
        "100",
        type=integer(1),
    )
    evaluate.value(
        "--batch N", "windows per batch; default: 1", "8", type=integer(1), default=1
    )
    _add_model_options(evaluate)
    evaluate.flag("--json", "exact numbers, as an object")

    prepare = add(
        "data prepare FILE ... --out DIR --tokenizer T [options]",
        "tokenize text or conversations into a folder to train on",
        """\
Tokenize text in several processes into memory-mapped shards with an index and checksums;
data=prepared data.folder=DIR trains on them. DIR exists only when complete; after an interruption
the same command resumes. The result depends neither on that nor on --processes.

FILE is a path, a glob, or stdlib (the source of Python's standard library). Its extension gives the
format: .jsonl, .ndjson and .json have one object per line, .parquet and .arrow are tables, anything
else is one document of UTF-8 text; .gz and .zst are decompressed. A folder saved by datasets can be
read too. Tables, such folders and .zst need pip install -e '.[data]'.
""",
    )
    prepare.value("--out DIR", "folder to make; must not exist")
    _add_chat_words(prepare)
    prepare.flag(
        "--skip-bad-rows",
        "with --chat: leave out rows that are no conversation, instead of stopping",
    )
    prepare.value(
        "--eval-fraction X",
        "share of the documents to hold out, by a hash of their text; default: 0",
        "0.01",
        default=0.0,
        type=number(
            "number of at least 0 and below 1", "0.01", lambda value: 0 <= value < 1
        ),
    )
    prepare.value(
        "--processes N",
        "tokenizing processes; default: one per core",
        "2",
        type=integer(1),
    )
    prepare.value(
        "--shard-tokens N",
        f"a shard ends with the document that reaches this number; default: {2**27}",
        str(2**27),
        type=integer(2**27),
    )
    add(
        "data check DIR ...",
        "verify the checksums of such folders; status 1 if one is damaged",
    )
    show = add(
        "data show DIR ... [--json] | ROWS ... --chat --tokenizer T [--row N]",
        "print the index of folders, or a conversation with what is learned of it",
        """\
Without --chat, print documents, tokens, splits, tokenizer and sources of prepared folders. With
--chat, read conversations as data=chat does, and print one as the template writes it: the learned
tokens in color, or in brackets where there is none, their number, and what the template leaves out.
""",
    )
    show.flag("--json", "exact numbers, as a list of objects")
    _add_chat_words(show)
    show.value(
        "--row N",
        "with --chat: the conversation to print, from 1; default: 1",
        "1",
        type=integer(1),
    )

    ls = add(
        "checkpoint ls PATH [--verify] [--json]",
        "list the checkpoints of a run, and the one that checkpoint.resume=auto selects",
        """\
List checkpoints: step, state, time, layout, tensors, size, and whether the checksums hold. PATH is
a run directory, a folder or URL of checkpoints, or one of them. An incomplete one has no manifest:
it is being written, or was left by a kill. Checksums are compared if local checkpoints have at most
1 GiB together, or with --verify.

Exit status: 0, 1 if one is damaged, 2 after a mistake.
""",
    )
    ls.flag("--verify", "read all files and compare their checksums")
    ls.flag("--json", "exact numbers, as an object")
    contents = add(
        "checkpoint show PATH [PATTERN] [--json]",
        "show the contents of a checkpoint: layout, tensors, optimizer states, position in the "
        "data",
        """\
Show a checkpoint, or the newest complete one of a run or folder, and its parameters. PATTERN
selects other tensors by name: model.NAME is a parameter, optim.NAME.STATE a state of it; * stands
for any text, as in 'optim.*.exp_avg'.
""",
    )
    contents.flag(
        "--json", "exact numbers, and all facts besides tensors, as an object"
    )

    usages = [
        re.sub(r"fsdptoys train -m \.\.\.", "", parser.usage or "").strip()
        for parser in parsers.values()
    ]
    root.usage = "\n       ".join([*usages, "fsdptoys --version"])
    return root, parsers
