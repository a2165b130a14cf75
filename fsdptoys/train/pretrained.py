"""Load a trained model from a run, a checkpoint or a folder in Hugging Face format, for use in a
single process.

``TrainedModel`` reads settings and file headers, and reports every user mistake before ``load``
allocates memory. Limit: the model must fit into one device's memory.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdptoys.checkpoint import (
    MANIFEST_FILE,
    RUN_FOLDER,
    WEIGHTS_FOLDER,
    CheckpointWeights,
    HuggingFaceFolder,
    RunWeights,
    named_weights,
    read_token_ids,
    step_of,
    verify_checksums,
)
from fsdptoys.checkpoint.adapter_folder import AdapterFolder
from fsdptoys.checkpoint.hf_folder import CONFIG_FILE
from fsdptoys.checkpoint.safetensors_io import slices
from fsdptoys.config.kernel_choice import KernelConfig, put_kernels
from fsdptoys.config.saved import read_data_config
from fsdptoys.data import DataConfig
from fsdptoys.data.chat import ChatConfig
from fsdptoys.data.chat_template import ChatTemplate, open_template
from fsdptoys.data.dataset_index import TOKENIZER_FILE
from fsdptoys.data.tokenizer import CHOICE, Tokenizer, open_tokenizer
from fsdptoys.device import DEVICE_TYPES, Device, available_device_type
from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel, ModelConfig, stored_buffers, whole
from fsdptoys.models.huggingface import Bounds
from fsdptoys.parallel.init_weights import init_buffers, materialize

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def open_weights(source: str, say: Any = print) -> RunWeights | CheckpointWeights:
    """Open the final weights of a run, or else its newest checkpoint, and verify their checksums.

    Args:
        source: run directory, its ``weights`` folder, or folder or URL of a checkpoint.
        say: receives a message if a checkpoint replaces missing final weights.
    """
    run = Path(source).expanduser()
    if (
        "://" in source
        or run.name == RUN_FOLDER
        or step_of(run.name) is not None
        or (run / MANIFEST_FILE).exists()
    ):
        return CheckpointWeights(source)
    if not (run / WEIGHTS_FOLDER).exists() and (run / RUN_FOLDER).is_dir():
        weights = CheckpointWeights(source)
        say(
            f"{source} holds no final weights; taking those of its newest checkpoint, "
            f"{weights.name}"
        )
        return weights
    final = RunWeights(source)
    verify_checksums(final.path)
    return final


class TrainedModel:
    """Configuration and location of a trained model, before its weights are loaded; ConfigError if
    incomplete.

    Args:
        source: as for ``open_weights``, or a folder in Hugging Face format.
        say: receives messages for the user.
        adapter: folder in PEFT's format; its adapters are added to the weights.
    """

    config: ModelConfig
    context: int
    """Context length in tokens: ``train.seq_len`` of a run, ``max_seq_len`` of a Hugging Face
    folder."""

    def __init__(
        self, source: str, say: Any = print, adapter: str | None = None
    ) -> None:
        self.source = source
        path = Path(source).expanduser()
        if "://" not in source and not path.is_dir():
            raise ConfigError(
                f"{source} is not a folder; name the directory of a run, a checkpoint, or a "
                "folder in Hugging Face format"
            )
        self._weights: RunWeights | CheckpointWeights | HuggingFaceFolder
        self._settings: Mapping[str, Any] = {}
        self._cached: dict[str, Tensor] = {}
        self._shapes: dict[str, torch.Size] = {}
        if (path / CONFIG_FILE).exists():
            self._weights = HuggingFaceFolder(path)
            self.config = self._weights.model_config()
            self._weights.check(self._build())
            verify_checksums(self._weights.path)
        else:
            self._weights = open_weights(source, say)
            self._settings = self._weights.settings
            self.config = self._weights.config.with_settings(init_from=None)
        self._adapter: AdapterFolder | None = None
        if adapter is not None:
            self._adapter = AdapterFolder(adapter)
            self._adapter.check(self._build())
            verify_checksums(self._adapter.path)
        seq_len = self._setting("train", "seq_len")
        self.context = (
            min(seq_len, self.config.max_seq_len)
            if type(seq_len) is int
            else self.config.max_seq_len
        )

    def choose_context(self, context: int | None) -> int:
        """Return the context length to use, in tokens; ConfigError if it exceeds
        ``model.max_seq_len``."""
        if context is not None and context > self.config.max_seq_len:
            longest = self.config.max_seq_len
            raise ConfigError(
                f"--context {context} is more than model.max_seq_len={longest}; write --context "
                f"{longest}"
            )
        return context or self.context

    def tokenizer(self, choice: str | None) -> Tokenizer:
        """Return the chosen tokenizer, or that of the folder or of the run's data; ConfigError if
        none is known."""
        if choice == "ids":
            return open_tokenizer(choice, self.config.vocab_size)
        data = self.data()
        reason = ""
        if choice is None and isinstance(self._weights, HuggingFaceFolder):
            if (self._weights.path / TOKENIZER_FILE).is_file():
                choice = str(self._weights.path)
        elif choice is None and data is not None:
            try:
                choice = data.find_tokenizer()
            except ConfigError as error:
                # its fix, the second clause, is about training
                reason = f" any more ({str(error).partition('; ')[0]})"
        if choice is None:
            raise ConfigError(f"{self.source} has no tokenizer{reason}; write {CHOICE}")
        return open_tokenizer(
            choice, self.config.vocab_size, plain=data is not None and data.plain_texts
        )

    def chat_template(self, choice: str | None) -> ChatTemplate:
        """The template of the run's conversations, or of the chosen tokenizer's folder; ConfigError
        if none."""
        data = self.data()
        template = None
        if choice is None and isinstance(data, ChatConfig):
            choice = data.find_tokenizer()
            template = data.template
        elif choice is None:
            choice = (
                str(self._weights.path)
                if isinstance(self._weights, HuggingFaceFolder)
                else "bytes"
            )
        missing = (
            f"--tokenizer {choice} has no chat template; name the folder of a chat model, or "
            "leave out --chat"
        )
        return open_template(template, choice, "data.template", missing)

    def data(self) -> DataConfig | None:
        """The data configuration of the run; None if unknown, as for a Hugging Face folder;
        ConfigError if invalid."""
        return (
            read_data_config(self._settings, self.source)
            if "data" in self._settings
            else None
        )

    def data_seed(self) -> int:
        """The seed of the run's synthetic data; ConfigError if the run's settings lack it."""
        seed = self._setting("train", "data_seed")
        if type(seed) is not int:
            raise ConfigError(
                f"{self.source} says train.data_seed={seed}; use the file that the run wrote"
            )
        return seed

    def ends(self) -> frozenset[int]:
        """End-of-text token ids named by a folder in Hugging Face format; empty otherwise."""
        if not isinstance(self._weights, HuggingFaceFolder):
            return frozenset()
        ids = read_token_ids(self._weights.path).get("eos_token_id", [])
        return frozenset(ids if isinstance(ids, list) else [ids])

    @torch.no_grad()
    def load(self, device: Device, dtype: torch.dtype) -> DecoderModel:
        """Return the model with its weights on a device, in evaluation mode."""
        model = self._build()
        kernels = KernelConfig()
        # Lengths change with every token, for which compiled functions would be compiled again.
        kernels.resolve(device.type, compiles=False, deterministic=False, fuses=False)
        put_kernels(model, kernels)
        model.to(dtype).requires_grad_(False)
        materialize(model, device.torch_device, self._fill)
        init_buffers(model, device.torch_device, torch.float32, dtype)
        for buffer in stored_buffers(model):
            self._fill(buffer.tensor, buffer.name)
        return model.eval()

    def _build(self) -> DecoderModel:
        with torch.device("meta"):
            return self.config.build()

    def read(self, name: str, region: Bounds) -> Tensor:
        """Return a part of a parameter, in float32 on the CPU; parts of one parameter should be
        read in a row."""
        return self._whole(name)[slices(region)]

    def _fill(self, param: Tensor, name: str) -> None:
        if self._adapter is not None and self._adapter.adapts(name):
            param.copy_(self._whole(name))
        else:
            self._fill_alone(param, name)

    def _fill_alone(self, param: Tensor, name: str) -> None:
        """Fill a parameter without its adapter."""
        if isinstance(self._weights, HuggingFaceFolder):
            self._weights.fill(param, name)
        else:
            param.copy_(self._weights.read(name, whole(tuple(param.shape))))

    @torch.no_grad()
    def _whole(self, name: str) -> Tensor:
        if name not in self._cached:
            if not self._shapes:
                weights = named_weights(self._build())
                self._shapes = {other: weight.shape for other, weight in weights}
            param = torch.empty(self._shapes[name])
            self._fill_alone(param, name)
            if self._adapter is not None:
                self._adapter.merge(param, name)
            self._cached = {name: param}
        return self._cached[name]

    def _setting(self, section: str, key: str) -> Any:
        values = self._settings.get(section)
        return values.get(key) if isinstance(values, Mapping) else None


def read_device(
    device_type: str | None, dtype: str | None
) -> tuple[Device, torch.dtype]:
    """Return the device and dtype named by ``--device`` and ``--dtype``; ConfigError if one does
    not exist."""
    dtype = dtype or "float32"
    if dtype not in DTYPES:
        raise ConfigError(
            f"--dtype {dtype} must be one of {', '.join(DTYPES)}; write --dtype float32"
        )
    device_type = device_type or available_device_type()
    if device_type not in DEVICE_TYPES:
        raise ConfigError(
            f"--device {device_type} must be one of {', '.join(DEVICE_TYPES)}; write --device cpu"
        )
    try:
        return Device(device_type), DTYPES[dtype]
    except ConfigError as error:
        message = (
            str(error)
            .replace("set launch.device=", "write --device ")
            .replace("launch.device=", "--device ")
        )
        raise ConfigError(message) from error
