"""Trained weights of a run, from its directory or from a checkpoint.

``RUN/weights`` holds float32 tensors under the model's parameter names, ``RUN/config.yaml`` the
model's configuration. Neither depends on the strategy or the number of ranks, except for the order
of tensors in the files. Not covered: optimizer states, so a run cannot resume from ``RUN/weights``.
"""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdptoys.errors import ConfigError
from fsdptoys.imports import explain_missing
from fsdptoys.models import MODELS, DecoderModel, ModelConfig
from fsdptoys.models.huggingface import Bounds
from fsdptoys.utils.foreign import parse_yaml
from fsdptoys.utils.regular_file import read_regular
from fsdptoys.utils.sealed_folder import new_folder
from fsdptoys.utils.text import short_text

from .checksums import CHECKSUMS_FILE
from .config import CheckpointConfig
from .load import read_checkpoint
from .manifest import InvalidCheckpointError
from .model_config import build_model_config, named_weights
from .ranks import Ranks
from .safetensors_io import MAX_FILE_BYTES, TensorFolder, Written, slices, write_tensors
from .select import find_checkpoint, locate
from .storage import open_storage

WEIGHTS_FOLDER = "weights"
CONFIG_FILE = "config.yaml"
STEM = "weights"
LARGEST_CONFIG_BYTES = 2**20


def save_weights(
    folder: Path,
    params: Iterator[tuple[str, Tensor]],
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Written:
    """Write a model's parameters atomically, on one rank, while all others exhaust their iterators.

    ``params`` are full CPU tensors, each in its own unchanging memory; the iterator is exhausted
    even after a write error, since every step is collective. ``max_file_bytes`` is also roughly the
    peak memory. ConfigError if the folder is taken or cannot be written.
    """
    try:
        with new_folder(folder, CHECKSUMS_FILE) as temporary:
            return write_tensors(temporary, STEM, params, max_file_bytes)
    except ConfigError:
        for _ in params:
            pass
        raise


class RunWeights:
    """Final weights of a run, from its directory or the folder ``weights`` in it.

    ConfigError if it holds no weights, or they are incomplete or do not fit the model in
    ``config.yaml``.
    """

    def __init__(self, path: str | Path) -> None:
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise ConfigError(
                f"{path} is not a folder, and the directory of a run is expected; name one"
            )
        is_run = (folder / CONFIG_FILE).exists() or (folder / WEIGHTS_FOLDER).exists()
        self.path = folder / WEIGHTS_FOLDER if is_run else folder
        if not any(self.path.glob(f"{STEM}*.safetensors*")):
            raise ConfigError(
                f"{path} holds no weights; train with checkpoint.final_weights=true"
            )
        where = self.path.absolute().parent / CONFIG_FILE
        # the run's configuration, as plain values
        self.settings = _read_settings(where)
        self.config = run_model_config(
            self.settings, str(where), "use the file that the run wrote"
        )
        self.tensors = TensorFolder(self.path, STEM)
        shapes = _shapes_of(self.config)
        reader = f"the model of {CONFIG_FILE}"
        self.tensors.require(
            shapes, reader, f"use the {CONFIG_FILE} that the run wrote"
        )

    def read(self, name: str, region: Bounds) -> Tensor:
        """Read a part of a parameter. Opens the file on each call, so that pages read do not stay
        in memory."""
        with self.tensors.reading() as read:
            return read(name, region)


def _shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model: DecoderModel = config.build()
    return {name: tuple(weight.shape) for name, weight in named_weights(model)}


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        tree = parse_yaml(read_regular(path, LARGEST_CONFIG_BYTES))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"{path} cannot be read ({reason}), and should describe the model of the weights; "
            "restore it"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{path} cannot be read as YAML ({error}); use the file that the run wrote"
        ) from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path} lacks the section model; use the file that the run wrote"
        )
    return tree


def run_model_config(tree: Mapping[str, Any], where: str, fix: str) -> ModelConfig:
    """Build the model configuration of a run's settings; see :func:`model_config_of`.

    Raises:
        ConfigError: also for a family of own code, which names the missing imports.
    """
    section = tree.get("model")
    family = section.get("family") if isinstance(section, dict) else None
    missing = explain_missing(tree)
    if missing is not None and isinstance(family, str) and family not in MODELS:
        raise ConfigError(f"{where} says model.family={short_text(family)}; {missing}")
    return model_config_of(section, where, fix)


def model_config_of(section: object, where: str, fix: str) -> ModelConfig:
    """Build a model configuration from the ``model`` section of a run's settings; ``where``,
    ``fix``: for messages."""
    if not isinstance(section, dict):
        raise ConfigError(f"{where} lacks the section model; {fix}")
    values = dict(section)
    family = values.pop("family", None)
    if not isinstance(family, str) or family not in MODELS:
        raise ConfigError(
            f"{where} says model.family={short_text(family)}, which is none of "
            f"{', '.join(MODELS)}; correct it"
        )
    return build_model_config(MODELS[family], values, where, "model", complete=True)


class CheckpointWeights:
    """Model parameters of a checkpoint, read one at a time after all files are verified against the
    manifest.

    ``where`` is the path or URL of a checkpoint, or of a folder of checkpoints or a run, for its
    newest one. ConfigError if there is none, or it is incomplete, damaged or unreadable.
    """

    def __init__(self, where: str) -> None:
        try:
            if find_checkpoint(where) is None:
                raise ConfigError(
                    f"{where} holds neither checkpoints nor the trained weights; train with "
                    "checkpoint.final_weights=true, which keeps them"
                )
            location = locate(CheckpointConfig(resume=where), None)
        except ConfigError as error:
            raise ConfigError(str(error).removeprefix("checkpoint.resume=")) from error
        try:
            self._checkpoint = read_checkpoint(
                Ranks(None), open_storage(location.where), location.name
            )
        except InvalidCheckpointError as problem:
            raise ConfigError(
                f"{where}: {location.name} {problem}; name another checkpoint"
            ) from problem
        self.name = location.name
        settings = self._checkpoint.facts.get("config")
        self.settings: dict[str, Any] = settings if isinstance(settings, dict) else {}
        self.config = run_model_config(
            self.settings, f"{where}: {location.name}", "name another checkpoint"
        )
        tune = self.settings.get("tune")
        if isinstance(tune, dict) and tune.get("name") == "lora":
            raise ConfigError(
                f"{where}: {location.name} holds adapters without the weights that they are added "
                "to; train to the end with checkpoint.final_weights=true, and name the run"
            )
        self._shapes = _shapes_of(self.config)
        # A stack's experts are requested one by one, alternating between gate, up and down.
        self._load_cached = functools.lru_cache(maxsize=3)(self._load)

    def read(self, name: str, region: Bounds) -> Tensor:
        """Return a part of a parameter."""
        return self._load_cached(name)[slices(region)]

    def _load(self, name: str) -> Tensor:
        whole = torch.empty(self._shapes[name])
        self._checkpoint.load({f"model.{name}": whole}, weights_only=True)
        return whole
