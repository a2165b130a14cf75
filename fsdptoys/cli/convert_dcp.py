"""``fsdptoys convert from-dcp`` and ``to-dcp``: checkpoints of torchtitan, in and out.

The folders of ``torch.distributed.checkpoint`` hold tensors and no settings. So the model is named
by the words of ``model=…`` after the paths, or found among the presets by the shapes.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fsdptoys.checkpoint import (
    Written,
    dtype_name,
    verify_checksums,
    write_hugging_face,
)
from fsdptoys.checkpoint.dcp_export import write_dcp
from fsdptoys.checkpoint.dcp_folder import DCPFolder
from fsdptoys.checkpoint.torchtitan import (
    FAMILIES,
    VERSIONS,
    TitanWeights,
    read_titan_tensor,
    titan_biases,
    titan_tensors,
)
from fsdptoys.config.choices import list_choices, schema_name
from fsdptoys.config.compose import compose_config, compose_presets
from fsdptoys.errors import ConfigError
from fsdptoys.models import ModelConfig, RotaryConfig
from fsdptoys.train.pretrained import DTYPES, TrainedModel
from fsdptoys.utils.sealed_folder import check_new_folder
from fsdptoys.utils.text import counted, value_text

from .commands import check_count, parse


def from_dcp(argv: Sequence[str]) -> tuple[ModelConfig, Path]:
    """Write a folder in Hugging Face format; return its model and its path."""
    command = "convert from-dcp"
    paths, options = _split_arguments(command, argv, "DCP_DIR OUT_DIR")
    overrides = [option for option in options if re.match(r"model[.=]", option)]
    dtype = _read_settings(command, options, overrides, {"dtype": "float32"})["dtype"]
    if overrides and not any(word.startswith("model=") for word in overrides):
        raise ConfigError(
            f"{overrides[0]} changes a preset that is not named; write fsdptoys {command} "
            f"{' '.join(paths)} model=llama3_8b {overrides[0]}"
        )
    out_dir = Path(paths[1]).expanduser()
    check_new_folder(out_dir)
    folder = DCPFolder(paths[0])
    config = compose_config(overrides).model if overrides else _find_model(folder)
    weights = TitanWeights(folder, config)
    verify_checksums(folder.path)
    weights.check_values()
    summary = write_hugging_face(out_dir, config, weights.read, DTYPES[dtype])
    _print_written(out_dir, summary, dtype)
    assert isinstance(config, RotaryConfig)
    scaling = config.rope_scaling
    scaled = (
        f"scaled by {scaling.factor:g} ({scaling.kind.value})"
        if scaling.factor > 1
        else "not scaled"
    )
    print(
        f"of model={config.name}: rotary base {config.rope_theta:g}, {scaled}; norm_eps "
        f"{config.norm_eps:g}\nDCP files hold no settings: compare these with those of the run"
    )
    return config, out_dir


def to_dcp(argv: Sequence[str]) -> int:
    """Write a folder that torch.distributed.checkpoint reads, under torchtitan's names."""
    command = "convert to-dcp"
    paths, options = _split_arguments(command, argv, "RUN_OR_DIR OUT_DIR")
    defaults = {"dtype": "float32", "names": VERSIONS[0]}
    settings = _read_settings(command, options, [], defaults)
    version = settings["names"]
    dtype = DTYPES[settings["dtype"]]
    out_dir = Path(paths[1]).expanduser()
    check_new_folder(out_dir)
    source = TrainedModel(paths[0])
    tensors = {tensor.name(version): tensor for tensor in titan_tensors(source.config)}
    biases = titan_biases(source.config, version)
    shapes = {name: tensor.shape for name, tensor in tensors.items()} | biases

    def load(name: str) -> Tensor:
        if name in biases:
            return torch.zeros(biases[name], dtype=dtype)
        return read_titan_tensor(tensors[name], source.read, dtype)

    write_dcp(out_dir, shapes, dtype, load)
    print(
        f"wrote {out_dir}: {counted(len(shapes), 'tensor')} in {dtype_name(dtype)}, under the "
        f"names of torchtitan {version}\nload it with torch.distributed.checkpoint.load, or name "
        "it as torchtitan's checkpoint.initial_load_path"
    )
    return 0


def _split_arguments(
    command: str, argv: Sequence[str], form: str
) -> tuple[list[str], list[str]]:
    """Return the two paths and the words with ``=``."""
    arguments = parse(command, argv).arguments
    options = [word for word in arguments if re.match(r"[\w.]+=", word)]
    paths = [word for word in arguments if word not in options]
    check_count(command, paths, 2, "two folders", form)
    return paths, options


def _read_settings(
    command: str,
    options: Sequence[str],
    overrides: Sequence[str],
    defaults: dict[str, str],
) -> dict[str, str]:
    """Return the settings of a command; ``overrides`` are those of the model."""
    choices = {"dtype": tuple(DTYPES), "names": VERSIONS}
    settings = dict(defaults)
    for option in options:
        if option in overrides:
            continue
        key, _, value = option.partition("=")
        if key not in defaults:
            raise ConfigError(
                f"{option} is not a setting of fsdptoys {command}; leave it out, or set "
                f"{' or '.join(defaults)}"
            )
        if value not in choices[key]:
            raise ConfigError(
                f"{option} must be one of {', '.join(choices[key])}; set {key}={defaults[key]}"
            )
        if sum(other.startswith(f"{key}=") for other in options) > 1:
            raise ConfigError(f"{key}= is written twice; keep one of them")
        settings[key] = value
    return settings


def _print_written(out_dir: Path, summary: Written, dtype: str) -> None:
    files = summary.files[0]
    if len(summary.files) > 1:
        files = f"{len(summary.files)} files"
    print(
        f"wrote {out_dir}: {files} with {summary.parameters:,} parameters in {dtype}, "
        f"{summary.tensor_bytes:,} bytes"
    )


def _find_model(folder: DCPFolder) -> ModelConfig:
    """Return the only preset with the folder's names and shapes; ConfigError if there is none or
    several."""
    names = [
        name
        for name in list_choices()["model"]
        if schema_name("model", name) in FAMILIES
    ]
    sizes = _sizes(folder)
    fitting = []
    for config in compose_presets(names):
        if sizes.items() <= vars(config).items() and _fits(folder, config):
            fitting.append(config)
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        presets = " or ".join(f"model={config.name}" for config in fitting)
        raise ConfigError(
            f"{folder.path} has the shapes of several presets; write {presets} after the folders"
        )
    family = "llama_debug"
    if any(name.endswith("attention.q_norm.weight") for name in folder.tensors):
        family = "qwen3_debug"
    overrides = " ".join(
        f"model.{key}={value_text(size)}" for key, size in sizes.items()
    )
    raise ConfigError(
        f"{folder.path} has the shapes of no preset; write the model after the folders, as "
        f"model={family} {overrides} model.n_heads=N model.n_kv_heads=N"
    )


def _fits(folder: DCPFolder, config: ModelConfig) -> bool:
    try:
        TitanWeights(folder, config)
    except ConfigError:
        return False
    return True


def _sizes(folder: DCPFolder) -> dict[str, int]:
    """Sizes of a model that the shapes alone decide.

    Raises:
        ConfigError: if the folder holds no model under torchtitan's names.
    """
    for prefix in ("", "model."):
        embedding = folder.tensors.get(f"{prefix}tok_embeddings.weight")
        if embedding is None or len(embedding.shape) != 2:
            continue
        blocks = {
            name.removeprefix(prefix).split(".")[1]
            for name in folder.tensors
            if name.startswith(f"{prefix}layers.")
        }
        sizes = dict(zip(("vocab_size", "dim"), embedding.shape, strict=True))
        gate = folder.tensors.get(f"{prefix}layers.0.feed_forward.w1.weight")
        if gate is not None:
            sizes["ffn_dim"] = gate.shape[0]
        return {"n_layers": len(blocks), **sizes}
    names = ", ".join(sorted(folder.tensors)[:3]) or "no tensor"
    raise ConfigError(
        f"{folder.path} holds {names}, and no tok_embeddings.weight, as torchtitan's Llama 3 and "
        "Qwen3 have; name a checkpoint of torchtitan"
    )
