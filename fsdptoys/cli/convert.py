"""``fsdptoys convert``: write weights in Hugging Face format or under torchtitan's names, or print
the command that trains from such a folder.

``from-hf`` writes nothing, since training reads these folders directly. It reads every file to
check the folder and prints the command.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fsdptoys.checkpoint import (
    CHECKSUMS_FILE,
    HuggingFaceFolder,
    differences,
    dtype_name,
    read_token_ids,
    verify_checksums,
    write_hugging_face,
)
from fsdptoys.config.choices import list_choices, schema_name
from fsdptoys.config.compose import compose_presets
from fsdptoys.data.dataset_index import TOKENIZER_FILE
from fsdptoys.data.tokenizer import find_token_ids, read_tokenizer_files
from fsdptoys.errors import ConfigError
from fsdptoys.models import ModelConfig, TransformersConfig
from fsdptoys.train.pretrained import DTYPES, TrainedModel, open_weights
from fsdptoys.utils.sealed_folder import check_new_folder
from fsdptoys.utils.text import printable, value_text

from .commands import check_count, parse, run_part
from .convert_dcp import from_dcp, to_dcp


def convert_command(argv: Sequence[str]) -> int:
    """Run the command; return the exit status 0."""
    parts = {
        "to-hf": _to_hf,
        "from-hf": _from_hf,
        "from-dcp": _from_dcp,
        "to-dcp": to_dcp,
    }
    return run_part("convert", argv, parts)


def _to_hf(argv: Sequence[str]) -> int:
    arguments = parse("convert to-hf", argv).arguments
    options = [argument for argument in arguments if re.match(r"\w+=", argument)]
    paths = [argument for argument in arguments if argument not in options]
    check_count("convert to-hf", paths, 2, "a run and a new folder", "RUN OUT_DIR")
    settings = {"dtype": "float32", "tokenizer": "", "adapter": ""}
    for option in options:
        key, _, value = option.partition("=")
        if key not in settings:
            raise ConfigError(
                f"{option} is not a setting of fsdptoys convert to-hf; leave it out, or set dtype, "
                "tokenizer or adapter"
            )
        if key == "dtype" and value not in DTYPES:
            raise ConfigError(
                f"{option} must be one of {', '.join(DTYPES)}; set dtype=float32"
            )
        same = [other for other in options if other.startswith(f"{key}=")]
        if len(same) > 1:
            raise ConfigError(
                f"{' and '.join(same)} exclude each other; keep one of them"
            )
        settings[key] = value
    out_dir = Path(paths[1]).expanduser()
    dtype = DTYPES[settings["dtype"]]
    tokenizer = (
        read_tokenizer_files(settings["tokenizer"], "tokenizer")
        if settings["tokenizer"]
        else {}
    )
    check_new_folder(out_dir)
    adapter = settings["adapter"]
    weights = (
        TrainedModel(paths[0], adapter=adapter) if adapter else open_weights(paths[0])
    )
    config = weights.config
    source = config.path if isinstance(config, TransformersConfig) else None
    if not tokenizer and source and (Path(source) / TOKENIZER_FILE).is_file():
        settings["tokenizer"] = source
        tokenizer = read_tokenizer_files(source, "model.path")
    ids = find_token_ids(Path(settings["tokenizer"]).expanduser()) if tokenizer else {}
    # the model that was trained on
    for origin in filter(None, (weights.config.init_from, paths[0])):
        ids = ids or read_token_ids(Path(origin).expanduser())
    summary = write_hugging_face(
        out_dir, weights.config, weights.read, dtype, tokenizer=tokenizer, token_ids=ids
    )
    files = (
        f"{len(summary.files)} files" if len(summary.files) > 1 else summary.files[0]
    )
    print(
        f"wrote {out_dir}: {files} with {summary.parameters:,} parameters in {dtype_name(dtype)}, "
        f"{summary.tensor_bytes:,} bytes\n"
        f"load it with transformers.AutoModelForCausalLM.from_pretrained({str(out_dir)!r}); "
        + (
            f"its tokenizer is that of {settings['tokenizer']}"
            if tokenizer
            else "a tokenizer is not in it"
        )
    )
    return 0


def _from_hf(argv: Sequence[str]) -> int:
    paths = parse("convert from-hf", argv).arguments
    check_count("convert from-hf", paths, 1, "one folder", "DIR")
    (path,) = paths
    folder = HuggingFaceFolder(path)
    config = folder.model_config()
    with torch.device("meta"):
        model = config.build()
    folder.check(model)
    command = shlex.join(training_words(config, path))
    verified = verify_checksums(folder.path)
    folder.check_values()
    checksums = (
        f"no {CHECKSUMS_FILE}"
        if verified is None
        else f"{verified} files match {CHECKSUMS_FILE}"
    )
    facts = {
        "family": config.family,
        "parameters": f"{model.parameter_counts().total:,}",
        "dtype": " and ".join(folder.tensors.dtypes()),
        "files": f"{len(folder.tensors.files)}, whole; {checksums}",
        "values": "all finite",
    }
    for label, value in facts.items():
        print(printable(f"{label:<12}{value}", sys.stdout))
    print(printable(f"\ntrain from it with:\n  {command}", sys.stdout))
    return 0


def _from_dcp(argv: Sequence[str]) -> int:
    config, out_dir = from_dcp(argv)
    command = shlex.join(training_words(config, str(out_dir)))
    print(printable(f"\ntrain from it with:\n  {command}", sys.stdout))
    return 0


def training_words(config: ModelConfig, path: str) -> list[str]:
    """Return the command that trains from a folder, based on the preset with the fewest differing
    keys.

    Args:
        config: the folder's model.
        path: the folder.

    Raises:
        ConfigError: if the family has no preset.
    """
    quoted = (
        value_text(path, quote=True)
        if "'" not in path
        else "'" + path.replace("'", "\\'") + "'"
    )
    if isinstance(config, TransformersConfig):
        folders = [f"model.path={quoted}", f"model.init_from={quoted}"]
        return ["fsdptoys", "train", f"model={config.family}", *folders]
    names = [
        name
        for name in list_choices()["model"]
        if schema_name("model", name) == config.family
    ]
    presets = dict(zip(names, compose_presets(names), strict=True))
    changes = {name: differences(preset, config) for name, preset in presets.items()}
    if not changes:
        raise ConfigError(
            f"{path} holds a {config.family} model, and configs/model has no preset of that "
            "family; add one"
        )
    preset = min(changes, key=lambda name: (len(changes[name]), name))
    settings = [
        f"model.{key}={value_text(value, quote=True)}"
        for key, (_, value) in changes[preset].items()
    ]
    return [
        "fsdptoys",
        "train",
        f"model={preset}",
        *settings,
        f"model.init_from={quoted}",
    ]
