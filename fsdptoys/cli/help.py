"""Help pages, generated from the YAML files and the config dataclasses, and parsing of dashed options.

Commands other than ``train`` have dashed options; a run's settings have no dashes.
"""

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from fsdptoys.config.overrides import list_choices, list_defaults, schema_name
from fsdptoys.config.schema_docs import Declaration, ancestors, collect_keys, read_classes
from fsdptoys.errors import ConfigError
from fsdptoys.utils.foreign import parse_yaml
from fsdptoys.utils.text import near_miss

HEAD = """\
usage: fsdptoys train [GROUP=CHOICE ...] [KEY=VALUE ...] [--cfg job]
"""

MODELS_HEAD = """\
usage: fsdptoys models [NAME ...] [--json]
"""

COMMANDS = (
    HEAD
    + """\
       fsdptoys train --help
       fsdptoys sweep [NAME] [KEY=VALUE,VALUE ...]
       fsdptoys plan [search] [GROUP=CHOICE ...] [KEY=VALUE ...] [--json]
       fsdptoys plan calibrate RUN_DIR ... [hardware=NAME] [out=FILE]
       fsdptoys report PATH ... [--out FILE.html | --table | --markdown | --csv | --json]
       fsdptoys report --live RUN_DIR
       fsdptoys compare RUN_A RUN_B [--tolerance X]
       fsdptoys models [NAME ...] [--json]
       fsdptoys convert to-hf RUN OUT_DIR
       fsdptoys convert from-hf DIR
       fsdptoys generate RUN_OR_DIR --prompt TEXT ...
       fsdptoys evaluate RUN_OR_DIR [--text FILE]
       fsdptoys data prepare FILE ... --out DIR --tokenizer T
       fsdptoys data check | show DIR ...
       fsdptoys --version

Trains a language model, as configured. Without any word it finds the hardware and trains what fits it.

  train            start one rank a device (two on a CPU) and train; under torchrun, be one of its ranks
  train --cfg job  print the configuration that these words compose to, and stop
  train --help     all groups, choices and keys
  sweep            train with one combination of settings after another, and compare; sweep --help tells more
  plan             tell memory and time of such a run on hardware that need not be there; plan --help tells more
  report           make a page, or a table, of runs and sweeps; or follow one that is running
  compare          tell at which step two runs first differ, and which settings could explain it
  models           parameters, active parameters and FLOPs a token of the model presets
  convert          write a run's weights in Hugging Face format, or read such a folder
  generate         go on from a prompt with a run's weights or those of a folder in Hugging Face format
  evaluate         loss and perplexity of such a model on a text, or on what its run held out
  data             turn files of text into a folder of tokens to train on; check such folders; data --help tells more
"""
)

MODELS = (
    MODELS_HEAD
    + """
Lists the model presets, or those that are named: family, parameters, layers, context and FLOPs a token. None of them is
made: they are built without memory and counted.

  --json  exact numbers, as a list of objects
"""
)


PLAN = """\
usage: fsdptoys plan [GROUP=CHOICE ...] [KEY=VALUE ...] [--json]
       fsdptoys plan search [GROUP=CHOICE ...] [KEY=VALUE ...] [--json] [--png FILE]
       fsdptoys plan calibrate RUN_DIR ... [hardware=NAME] [out=FILE]

Tells what a run would take on a machine that need not be there: the words are those of fsdptoys train, and a run's
own code takes two steps on an imagined device, without memory or kernels.

  plan.hardware=NAME     {hardware}, or a YAML file like those of
                         configs/hardware
  plan.world_size=N      ranks; one machine of that hardware where it is left out
  plan.memory_gib=X      memory of a device that may be used; all of it where it is left out
  plan.exact=true        trace every layer; otherwise a few, and the others follow
  plan.allocator=native  PyTorch's default segments instead of those that grow
  --json                 all numbers, for programs

  search     try strategies, meshes, checkpointing, chunked loss, offload and batches, and rank what fits by tokens/s;
             what the words set stays as it is; plan.rows=N rows are shown, --png draws memory against time
  calibrate  fit the efficiencies of a hardware profile to measured runs, and write a profile
"""

SWEEP = """\
usage: fsdptoys sweep [NAME] [KEY=VALUE,VALUE ...] [GROUP=CHOICE,CHOICE ...] [options]
       fsdptoys train -m ...

Trains with every combination of the values, each in processes of its own, and tells step time and memory of each in a
table. The words are those of fsdptoys train; several values are written as Hydra has them: a,b or choice(a,b) or
range(1,4); quoted text and [lists] are one value. What cannot be combined is left out, with the reason.

  NAME, one of these or a YAML file like those of configs/sweep; what is typed after it wins over it:
{sweeps}

  --dry-run             show the jobs and what is left out, and stop
  --out DIR             folder of the sweep; sweeps/<date>-<time>-<title> where it is left out
  --time-limit SECONDS  end a job that takes longer, and go on with the next
  --resume [DIR]        go on with a sweep: the folder, or the newest with the same words; finished jobs are not run
                        again, words given with DIR may add combinations
  --retry               with --resume, run jobs again that failed, ran out of memory or out of time
  hydra/launcher=submitit_slurm hydra.launcher.KEY=VALUE
                        hand the jobs to SLURM instead of running them here
"""

REPORT = """\
usage: fsdptoys report PATH ... [--out FILE.html]
       fsdptoys report PATH ... --table | --markdown | --csv | --json
       fsdptoys report --live RUN_DIR

Shows what runs and sweeps have left behind. PATH is a run directory, a sweep's folder, or a folder that holds some of
these, as runs.

  --out FILE.html  where the page goes; report.html in PATH where it is left out, or with several, in this folder
  --table          print the table instead, as wide as the terminal
  --markdown       the same for a page of one's own
  --csv            a line each row: raw numbers, with their units in their names
  --json           all that is known of each row
  --live RUN_DIR   follow a run, or the running job of a sweep, until it ends; Ctrl-C leaves it alone

Rows that train the same, in another layout or with other memory switches, should have the same losses; one that has
not is marked in the table, with the step at which it first differs and by how much.
"""

COMPARE = """\
usage: fsdptoys compare RUN_A RUN_B [--tolerance X]

Holds two runs against each other, step by step: losses, gradient norms, learning rates and valid tokens. Tells the
first step at which each differs and by how much, and the settings and versions that the runs do not share, the
likeliest to explain it first. A run is its directory, or the folder of a sweep's job.

  --tolerance X  relative difference up to which two numbers count as equal; 0, which asks for every bit, if left out

Exit status: 0 where both have the same steps and these are equal, 1 where they are not, 2 after a mistake.
"""

CONVERT = """\
usage: fsdptoys convert to-hf RUN OUT_DIR [dtype=float32|bfloat16|float16]
       fsdptoys convert from-hf DIR

  to-hf    write the weights that a run left behind (checkpoint.final_weights=true), or those of a checkpoint, in
           Hugging Face format; RUN is the run's directory, the folder weights in it, or a checkpoint's folder or URL;
           OUT_DIR does not exist yet
  from-hf  check a folder in Hugging Face format, every value of it, and tell the command that trains from it
"""

TRAINED = """\
  --context N            tokens that the model sees at most: train.seq_len of a run, the model's own of a folder, if
                         left out; at most model.max_seq_len
  --tokenizer T          bytes, ids (text is numbers with blanks between), or a tokenizer.json or its folder; if left
                         out, the folder's own, or what the run's data was made with
  --device D             cuda, npu or cpu; an accelerator where there is one, if left out
  --dtype D              number format of the weights: float32 (if left out), bfloat16 or float16
"""

SOURCE = """\
RUN_OR_DIR is the directory of a run with final weights (checkpoint.final_weights=true) or checkpoints, a checkpoint's
folder or URL, or a folder in Hugging Face format: config.json and safetensors files. The model must fit one device.
"""

GENERATE = """\
usage: fsdptoys generate RUN_OR_DIR --prompt TEXT [--prompt TEXT ...] [options]

Prints each prompt and what the model goes on with; how fast it was goes to stderr. Text ends with the folder's
eos_token_id, if it has one.

{source}
  --tokens N             tokens to add; 200 if left out
  --temperature X        divides the logits; 1 if left out, 0 takes the likeliest token
  --top-k N              draw from the N likeliest tokens only
  --top-p X              draw from the fewest likeliest tokens that have this probability together
  --seed N               of the draws, for each prompt anew; 0 if left out
{trained}\
  --json                 prompts, texts and the ids that were added, as a list of objects
"""

EVALUATE = """\
usage: fsdptoys evaluate RUN [options]
       fsdptoys evaluate RUN_OR_DIR --text FILE [options]

Tells the loss of the model in nats a token, its perplexity, and bits a byte: on what the run held out of its own data,
as the run's settings name it, or on a text. It is read in windows of --context tokens, each by itself.

{source}
  --text FILE            of which all tokens but the first are predicted once; what the run held out, if left out
  --windows N            the first N windows of what the run held out; all if left out
  --batch N              windows at a time; 1 if left out
{trained}\
  --json                 exact numbers, as an object
"""


DATA = """\
usage: fsdptoys data prepare FILE ... --out DIR --tokenizer T [options]
       fsdptoys data check DIR ...
       fsdptoys data show DIR ... [--json]

  prepare  turn text into ids, in several processes, and write them as memory-mapped shards with an index and checksums;
           data=prepared data.folder=DIR trains from them. DIR gets its name when it is whole. After an interruption
           the same command goes on from where it was; the result does not depend on that, nor on --processes.
  check    read every byte and hold it against the checksums; status 1 where one is damaged
  show     what the index says: documents, tokens, splits, tokenizer, sources

FILE is a path, a glob, or stdlib (the source of Python's standard library). Its name says what it holds: .jsonl,
.ndjson and .json one object a line, .parquet and .arrow tables, anything else one document of text in UTF-8; .gz and
.zst are unpacked. A folder that datasets has saved to disk is read too. Tables, such folders and .zst need
pip install 'fsdptoys[data]'.

  --out DIR              folder to make; must not exist
  --tokenizer T          bytes, or a tokenizer.json or the folder that holds it
  --document-end TOKEN   ends each document; the tokenizer's own if left out, 0 for bytes
  --field NAME           of records and tables, the field that holds the text; text if left out
  --eval-fraction X      share of the documents held out, by a hash of their text; 0 if left out
  --processes N          that turn text into ids; one a core if left out
  --shard-tokens N       a shard ends with the document that brings it to so many; {shard_tokens} if left out
  --json                 of show: exact numbers, as a list of objects
"""


def command_help() -> str:
    """The page of ``fsdptoys --help``."""
    return COMMANDS


def report_help() -> str:
    """The page of ``fsdptoys report --help``."""
    return REPORT


def compare_help() -> str:
    """The page of ``fsdptoys compare --help``."""
    return COMPARE


def convert_help() -> str:
    """The page of ``fsdptoys convert --help``."""
    return CONVERT


def generate_help() -> str:
    """The page of ``fsdptoys generate --help``."""
    return GENERATE.format(source=SOURCE, trained=TRAINED)


def evaluate_help() -> str:
    """The page of ``fsdptoys evaluate --help``."""
    return EVALUATE.format(source=SOURCE, trained=TRAINED)


def data_help() -> str:
    """The page of ``fsdptoys data --help``."""
    return DATA.format(shard_tokens=2**27)


def plan_help() -> str:
    """The page of ``fsdptoys plan --help``."""
    profiles = sorted(path.stem for path in (Path(__file__).parents[1] / "configs" / "hardware").glob("*.yaml"))
    return PLAN.format(hardware=", ".join(profiles))


def sweep_help() -> str:
    """The page of ``fsdptoys sweep --help``."""
    sweeps = []
    for path in sorted((Path(__file__).parents[1] / "configs" / "sweep").glob("*.yaml")):
        description = parse_yaml(path.read_text(encoding="utf-8"))["description"]
        text = f"{path.stem:<14} {' '.join(description.split())}"
        sweeps += textwrap.wrap(text, 120, initial_indent="    ", subsequent_indent=" " * 19)
    return SWEEP.format(sweeps="\n".join(sweeps))


def models_help() -> str:
    """The page of ``fsdptoys models --help``."""
    return MODELS


def train_help() -> str:
    """The page of ``fsdptoys train --help``."""
    return "\n".join([HEAD, "Groups (the default is marked with *):", *_groups(), "", "Keys:", *_keys()]) + "\n"


def _groups() -> list[str]:
    choices, defaults = list_choices(), list_defaults()
    lines = []
    for group, default in defaults.items():
        names = [f"{name}*" if name == default else name for name in choices[group]]
        if default is None:
            names.append("null (default: by hardware)")
        lines.append(f"  {group + '=':<12} {', '.join(names)}")
    return lines


def _keys() -> list[str]:
    classes, choices = read_classes(Path(__file__).parents[1]), list_choices()
    lines = []
    roots = []
    for section, annotation, default in classes["Config"].fields:
        if annotation not in classes:  # a top-level key
            roots.append(f"  {f'{section}={default}':<42} {classes['Config'].docs[section]}")
            continue
        base = classes[annotation]
        lines += ["", f"{section}: {base.doc}", *_fields(classes, annotation, section)]
        for name, found in classes.items():
            if annotation not in ancestors(classes, name):
                continue
            # parallel=fsdp1 selects FSDP1Config, parallel=toy_fsdp ToyFSDPConfig.
            choice = re.sub(r"^toy", "toy_", name.removesuffix("Config").lower())
            if found.family:
                presets = ", ".join(_presets(section, found.family))
                heading = f"a {found.family} model" + (f" ({presets})" if presets else "")
            elif choice in choices.get(section, ()):
                heading = f"{section}={choice}"
            else:
                continue
            own = _fields(classes, name, section, without=annotation)
            lines += [f" with {heading}: {found.doc}", *own] if own else []
    return ["", *roots, *lines] if roots else lines


def _presets(group: str, family: str) -> list[str]:
    """Return the names of the YAML files with a family's schema."""
    return [name for name in list_choices()[group] if schema_name(group, name) == family]


def _fields(classes: dict[str, Declaration], name: str, prefix: str, without: str | None = None) -> list[str]:
    """Return lines for a class's keys, including inherited ones, without those identical in class ``without``."""
    shown = collect_keys(classes, without) if without else {}
    lines = []
    for key, found in collect_keys(classes, name).items():
        if shown.get(key) == found:
            continue
        annotation, doc = found.annotation, found.doc
        if annotation in classes and classes[annotation].fields and "Enum" not in classes[annotation].bases:
            lines += _fields(classes, annotation, f"{prefix}.{key}")
            continue
        if annotation in classes:
            members = ", ".join(member for member, _, _ in classes[annotation].fields)
            doc = f"{doc} [{members}]"
        elif found.bounds:
            doc = f"{doc} [{found.bounds}]"
        lines.append(f"  {f'{prefix}.{key}={found.default}':<42} {doc}")
    return lines


def take_options(
    words: Sequence[str], flags: Sequence[str] = (), values: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[str], dict[str, str]]:
    """Split dashed options from the words; unknown ones stay and are rejected later.

    Args:
        words: as typed.
        flags: options without a value.
        values: options with a value, as ``--out FILE`` or ``--out=FILE`` → placeholder, ``FILE``.

    Returns:
        The other words, and option → value, empty for a flag.

    Raises:
        ConfigError: for an option without its value.
    """
    rest: list[str] = []
    options: dict[str, str] = {}
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        if word in flags:
            options[word] = ""
        elif name in values:
            if not equals:
                value = queue.pop(0) if queue else ""
            if not value or value.startswith("--"):
                raise ConfigError(f"{name} has no value; write {name} {values[name]}")
            options[name] = value
        else:
            rest.append(word)
    return rest, options


def take_repeated(words: Sequence[str], option: str, meaning: str) -> tuple[list[str], list[str]]:
    """Split an option that may be repeated from the words.

    Args:
        words: as typed.
        option: with its dashes.
        meaning: placeholder of its value.

    Returns:
        The other words, and the option's values in order.

    Raises:
        ConfigError: for an option without its value.
    """
    rest: list[str] = []
    values: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if word.startswith(f"{option}="):
            values.append(word.partition("=")[2])
        elif word == option:
            if not queue or queue[0].startswith("--"):
                raise ConfigError(
                    f"{option} has no value; write {option} {meaning}, or {option}=--x for one with dashes"
                )
            values.append(queue.pop(0))
        else:
            rest.append(word)
    return rest, values


def refuse_unknown(command: str, words: Sequence[str], options: Sequence[str]) -> None:
    """Reject unknown options, and options typed without their dashes.

    Raises:
        ConfigError: with the closest valid option.
    """
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            near = near_miss(name, options)
            if near == name:  # a flag with a value
                raise ConfigError(f"{word} gives a value to {name}, which takes none; write {name}")
            fix = f"did you mean {near}?" if near else f"see fsdptoys {command} --help"
            raise ConfigError(f"{word} is not an option of fsdptoys {command}; {fix}")
        if equals and f"--{name}" in options:
            raise ConfigError(f"{word} lacks its dashes; write --{name} {value}")


def read_number(
    options: Mapping[str, str],
    option: str,
    default: float,
    *,
    least: float,
    most: float = math.inf,
    above: bool = False,
) -> float:
    """Return the number given by an option.

    Args:
        options: option → typed value.
        option: name of the option.
        default: value if the option is absent.
        least: lower bound.
        most: upper bound.
        above: whether ``least`` itself is excluded.

    Raises:
        ConfigError: if it is not a number within the bounds.
    """
    typed = options.get(option)
    if typed is None:
        return default
    try:
        number = float(typed)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and least <= number <= most) or (above and number == least):
        bounds = f"{'above' if above else 'of at least'} {least:g}" + (
            f" and at most {most:g}" if most < math.inf else ""
        )
        raise ConfigError(f"{option} {typed} must be a number {bounds}; write {option} {default:g}")
    return number


def read_integer(options: Mapping[str, str], option: str, default: int, *, least: int) -> int:
    """Return the integer given by an option.

    Raises:
        ConfigError: if it is not an integer of at least ``least``.
    """
    typed = options.get(option)
    if typed is None:
        return default
    if not re.fullmatch(r"-?\d{1,18}", typed) or int(typed) < least:
        fix = f"write {option} {max(default, least)}"
        raise ConfigError(f"{option} {typed} must be a whole number of at least {least}; {fix}")
    return int(typed)
