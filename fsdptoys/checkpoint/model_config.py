"""Model configurations from files: type checks, and comparison by their effect on the weights.

Values come from JSON or YAML files that users may edit. A value of the wrong type would fail late
and far away, so it is rejected here under its name in the file.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from fsdptoys.errors import ConfigError
from fsdptoys.models import (
    DecoderModel,
    ModelConfig,
    WeightsFormat,
    stored_buffers,
)
from fsdptoys.utils.foreign import ForeignError
from fsdptoys.utils.from_tree import build, convert
from fsdptoys.utils.text import one_line, short_text, value_text


def build_model_config(
    family: type[ModelConfig],
    values: Mapping[str, Any],
    where: str,
    name: str,
    **options: Any,
) -> ModelConfig:
    """Build a family's configuration from the values of its fields in the file ``where``.

    ``name`` and ``options`` as for ``from_tree.build``. ConfigError for a missing or unknown key, a
    value of the wrong type, or one the dataclass rejects.
    """
    try:
        return build(family, values, name, **options)
    except ForeignError as error:
        raise ConfigError(f"{where}: {error}; correct it") from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"{where} describes a model that cannot be built: {one_line(error)}"
        ) from error


def weights_format(model: DecoderModel) -> WeightsFormat:
    """Return where a model's weights are in folders; a ConfigError if its family has none."""
    style = model.weights_format
    if style is None:
        config = model.config
        raise ConfigError(
            f"model={config.name} is of the family {config.family}, which has no Hugging Face "
            "format; set model.init_from=null and tune=full, and use the weights as the run "
            "wrote them"
        )
    try:
        style.check()
    except ValueError as error:
        raise ConfigError(
            f"{one_line(error)}; set model.init_from=null and tune=full, and use the weights as "
            "the run wrote them"
        ) from error
    return style


def named_weights(model: DecoderModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters and stored buffers of a model that is not wrapped."""
    yield from model.named_parameters()
    for buffer in stored_buffers(model):
        yield buffer.name, buffer.tensor


def check_type(value: Any, annotation: Any, where: str, key: str) -> None:
    """Check a file's value against its field's type; a ConfigError names file, key, value and
    type."""
    try:
        convert(annotation, value, key)
    except ForeignError as error:
        raise ConfigError(f"{where}: {error}; correct it") from error


def differences(chosen: ModelConfig, stored: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings of ``chosen`` to change so that weights of ``stored`` (same family)
    compute the same.

    Key below ``model.`` → (chosen value, wanted value), in field order.
    """
    assert type(chosen) is type(stored)
    changes = {}
    values = _flatten(chosen) | chosen.details()
    stored_values = _flatten(stored) | stored.details()
    implied = chosen.implied()
    stored_implied = stored.implied()
    for key, value in stored_values.items():
        value = stored_implied.get(key) if value is None else value
        if values.get(key) is None and value == stored_implied.get(key):
            continue  # implied by the other keys once they agree
        my_value = values.get(key)
        my_value = implied.get(key) if my_value is None else my_value
        if my_value != value and not stored.is_cosmetic(key):
            changes[key] = (my_value, value)
    return changes


def check_same(
    chosen: ModelConfig, stored: ModelConfig, holder: str, source: str
) -> None:
    """Reject weights of ``holder`` made with another configuration (``stored``) than the run's
    (``chosen``).

    ``source`` is the command or file with all settings of the weights, for the message.
    """
    if chosen.family != stored.family:
        raise ConfigError(
            f"model={chosen.name} is of the family {chosen.family}, and {holder} holds a "
            f"{stored.family} model; take the settings of {source}"
        )
    changes = differences(chosen, stored)
    if not chosen.needs_its_context:
        changes.pop("max_seq_len", None)
    for key, (value, stored_value) in changes.items():
        if key in chosen.details() or key in stored.details():
            raise ConfigError(
                f"model.path describes a model with {key}={short_text(value)}, and the weights of "
                f"{holder} were made with {short_text(stored_value)}; set model.path to the folder "
                "of their own config.json, and model.config=null"
            )
        rest = (
            f" ({source} lists the other {len(changes) - 1} too)"
            if len(changes) > 1
            else ""
        )
        raise ConfigError(
            f"model.{key}={value_text(value)} is not {value_text(stored_value)}, with which the "
            f"weights of {holder} were made; set model.{key}={value_text(stored_value)}{rest}"
        )


def _flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat |= _flatten(value, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = value
    return flat
