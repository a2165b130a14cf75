"""``model=transformers``: a causal language model of transformers by its ``config.json``.

The content of the file is part of the settings, so that a run can be read when the folder has
moved. No code of a folder is ever run: ``auto_map`` is dropped, and ``model_type`` must name a
class of the installed transformers. Settings that name implementations, such as kernels of the hub,
are dropped as well.

Dropout and jitter are set to 0: their random numbers would depend on the layout.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..capabilities import ModelCapabilities
from ..checks import MOST_LAYERS, at_least, check_bounds
from ..config import ReadJSON
from .architecture import Architecture, compared_settings, read_architecture
from .base import TransformersSettings
from .json_text import config_text

if TYPE_CHECKING:
    from .attention_probe import AttentionUse


@dataclass
class TransformersConfig(TransformersSettings):
    """A model of transformers."""

    family: ClassVar[str] = "transformers"
    has_presets: ClassVar[bool] = False

    name: str = "transformers"
    path: str | None = None
    """Folder with the model's config.json; weights in it are read only by ``init_from``."""
    config: str | None = None
    """Content of config.json; null to read it from ``path``, as a run does at its start."""
    layers: int | None = field(default=None, metadata=at_least(1, MOST_LAYERS))
    """Number of blocks in place of the configuration's, to try a model with few; null for all."""
    max_len: int | None = field(default=None, metadata=at_least(1, 2**30))
    """Longest sequence in place of the configuration's; null for its own."""
    init_from: str | None = None
    """Folder in Hugging Face format with the initial weights; null draws them from
    train.init_seed."""

    def __post_init__(self) -> None:
        check_bounds(self)
        for key in ("path", "init_from"):
            value = getattr(self, key)
            if value is not None and not value.strip():
                raise ValueError(f"model.{key}={value!r} must name a folder")

    def read_files(self, read_json: ReadJSON) -> list[Path]:
        """Read ``config.json``, unless its content is known."""
        if self.config is not None or self.path is None:
            return []
        file = Path(self.path).expanduser() / "config.json"
        if not file.exists():
            raise ValueError(
                f"model.path={self.path} has no config.json; name the folder of a model, such as a "
                "download: hf download OWNER/NAME --local-dir FOLDER"
            )
        self.config = config_text(read_json(file), str(file))
        return [file]

    def check(self) -> None:
        """Check that the configuration can be built, and what is built."""
        if self.config is None:
            raise ValueError(
                "model=transformers needs a configuration; set model.path=FOLDER, which holds the "
                "config.json of a model"
            )
        from .checks import check_model

        check_model(self)

    @property
    def architecture(self) -> Architecture:
        """What the configuration says.

        Raises:
            ValueError: if there is none, or transformers does not accept it.
        """
        if self.config is None:
            self.check()
        assert self.config is not None
        return read_architecture(self.config, self.layers)

    @property
    def capabilities(self) -> ModelCapabilities:
        """What is left to this project in a model that it does not compute itself."""
        return dataclasses.replace(CAPABILITIES, **self.architecture.lacks)

    @property
    def model_type(self) -> str:
        """The family of transformers."""
        return self.architecture.model_type

    @property
    def dim(self) -> int:
        """Width of the residual stream."""
        return self.architecture.dim

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return self.architecture.n_layers

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return self.architecture.n_heads

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.architecture.vocab_size

    @property
    def max_seq_len(self) -> int:
        """Longest sequence for the positions, in tokens."""
        return self.max_len or self.architecture.max_seq_len

    @property
    def tie_embeddings(self) -> bool:
        """Whether token embedding and head share one weight."""
        return self.architecture.tie_embeddings

    @property
    def head_width(self) -> int:
        """Channels of a head."""
        return self.architecture.head_width

    @property
    def needs_its_context(self) -> bool:
        """False: ``max_len`` bounds sequences only."""
        return False

    def is_cosmetic(self, key: str) -> bool:
        """Also the folder, its file, which ``details`` has in parts, and the longest sequence."""
        return key in ("path", "config", "max_len") or super().is_cosmetic(key)

    def details(self) -> dict[str, Any]:
        """The settings in ``config.json``, as transformers understands them."""
        if self.config is None:
            return {}
        return compared_settings(self.config, self.layers)

    def notes(self) -> list[str]:
        """Say what is set otherwise than in the file, what does not train, and that weights in the
        folder are not used."""
        from .checks import find_facts

        rows = [
            f"{name} row {row}"
            for name, zeros in find_facts(self).zero_rows.items()
            for row in zeros
        ]
        state = "stays zero" if self.init_from is None else "stays as it is"
        padding = [
            f"{', '.join(rows)} {state}, as in transformers (pad_token_id in config.json)"
        ]
        notes = [*self.architecture.notes, *padding[: len(rows)]]
        if self.init_from is None and self.path is not None:
            files = Path(self.path).expanduser().glob("*.safetensors")
            if next(files, None) is not None:
                notes.append(
                    f"model.path={self.path} holds weights that this run does not start from; set "
                    f"model.init_from={self.path} to start from them"
                )
        return notes

    def with_layers(self, count: int) -> "TransformersConfig":
        """Return the settings of a model with another number of blocks."""
        return dataclasses.replace(self, layers=count)

    def sequence_obstacle(self) -> str | None:
        """Why ranks cannot share its sequences, nor documents be kept apart."""
        return self._attention_use.obstacle

    @property
    def attends_plainly(self) -> bool:
        """Whether all its attention is causal, and no more."""
        return self._attention_use.is_plain

    @property
    def shared_heads(self) -> int:
        """The greatest common divisor of the numbers of query heads of its layers."""
        return math.gcd(self.n_heads, *self._attention_use.heads)

    @property
    def _attention_use(self) -> "AttentionUse":
        from .attention_probe import attention_use

        return attention_use(self)

    def without_gradients(self) -> list[str]:
        """Return the names of parameters that no loss reaches."""
        from .gradients import parameters_without_gradients

        return parameters_without_gradients(self) or []

    def build(self) -> Any:
        """Construct the model."""
        from .adapter import TransformersModel

        return TransformersModel(self)


CAPABILITIES = ModelCapabilities(
    splits_experts=False,
    splits_features=False,
    splits_layers=False,
    float8=False,
    nf4=False,
    layout_mode=False,
    own_kernels=False,
    buffer_dtype=False,
    fast_estimate=False,
    has_float32_modules=True,
)
