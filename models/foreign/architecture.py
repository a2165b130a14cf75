"""What a ``config.json`` says of a model, read by the classes of the installed transformers."""

import copy
import functools
import importlib.util
from dataclasses import dataclass, field
from typing import Any

from ..checks import MOST_CHANNELS, MOST_LAYERS, MOST_TOKENS
from .json_text import one_line, parse_text

RANDOM = ("dropout", "pdrop", "layerdrop", "jitter")
"""Parts of the names of settings that draw random numbers in training."""
DECODERS = ("gpt_neox", "gpt_neox_japanese", "reformer")
"""Model types that are causal whatever ``is_decoder`` says."""
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MUTATES_SAVED = ("gpt_oss",)
"""Model types that write to the results of operators that selective checkpointing keeps."""

DRAWS_EXPERTS = ("phimoe",)
"""Model types with ``router_jitter_noise`` in what they compute: it bounds the experts among which
training draws, and also masks others without training."""

SPECIAL_FLOAT = "__float__"
"""Key of an object that stands for an infinity or NaN."""


@dataclass(frozen=True)
class Architecture:
    """Numbers of a configuration under the names that this project has for them."""

    model_type: str
    """As in config.json."""
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_width: int
    vocab_size: int
    max_seq_len: int
    tie_embeddings: bool
    notes: list[str] = field(default_factory=list)
    """Sentences on what is set otherwise than in the file."""
    lacks: dict[str, bool] = field(default_factory=dict)
    """Capabilities of ``ModelCapabilities`` that differ from those of other models."""


def transformers_config(text: str, layers: int | None) -> Any:
    """Return a configuration of transformers that the caller may change.

    Raises:
        ValueError: if there is no transformers, or it does not accept the content.
    """
    return copy.deepcopy(_read(text, layers))


@functools.lru_cache(maxsize=16)
def read_architecture(text: str, layers: int | None) -> Architecture:
    """Return what a configuration says; errors as for ``transformers_config``."""
    config = _read(text, layers)
    lacks = {}
    if config.model_type in MUTATES_SAVED:
        lacks["selective_checkpointing"] = False
    numbers = _numbers(config)
    notes = [
        f"{config.model_type}: {key} is 0 in this run, and {value} in config.json: dropout and "
        "jitter would draw other numbers under another layout"
        for key, value in _randomness(parse_text(text))
    ]
    if getattr(config, "router_aux_loss_coef", 0):
        notes.append(
            f"{config.model_type}: the auxiliary loss of the router is not added "
            "(router_aux_loss_coef in config.json)"
        )
    return Architecture(
        model_type=config.model_type,
        tie_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        notes=notes,
        lacks=lacks,
        **numbers,
    )


COSMETIC = frozenset(
    {
        *("_name_or_path", "architectures", "dtype", "torch_dtype"),
        *("transformers_version", "use_cache", "id2label", "label2id"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id"),
        *("initializer_range", "router_aux_loss_coef", "return_dict"),
        *("output_hidden_states", "output_attentions", "output_router_logits"),
        *("problem_type", "finetuning_task", "tokenizer_class", "task_specific_params"),
    }
)
"""Settings that do not change what weights compute."""


def compared_settings(text: str, layers: int | None) -> dict[str, Any]:
    """Settings that weights were made with, as transformers understands them."""
    tree: dict[str, Any] = _read(text, layers).to_dict()
    return {key: value for key, value in tree.items() if key not in COSMETIC}


def with_layers(tree: dict[str, Any], layers: int | None) -> dict[str, Any]:
    """Return the content of ``config.json`` with another number of blocks; None for its own."""
    return tree if layers is None else _with_layers(tree, _config_class(tree), layers)


def has_causal_lm(name: str) -> bool:
    """Whether the installed transformers has a causal language model of this class name."""
    if importlib.util.find_spec("transformers") is None:
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


@functools.lru_cache(maxsize=16)
def _read(text: str, layers: int | None) -> Any:
    tree = parse_text(text)
    kind = _config_class(tree)
    if layers is not None:
        tree = _with_layers(tree, kind, layers)
    config = _construct(kind, tree)
    if config.model_type in DRAWS_EXPERTS and config.router_jitter_noise != 0:
        raise ValueError(
            f"config.json says router_jitter_noise={config.router_jitter_noise}, by which a "
            f"{config.model_type} model draws experts in training, others under each layout; set "
            "it to 0 there, which makes it another model"
        )
    for key, _ in _randomness(vars(config)):
        setattr(config, key, 0.0)
    _check_numbers(config)
    if (
        getattr(config, "is_decoder", None) is False
        and config.model_type not in DECODERS
    ):
        raise ValueError(
            f"config.json says is_decoder=false, with which a {config.model_type} model sees later "
            "tokens; name a folder of a causal language model"
        )
    return config


def _config_class(tree: dict[str, Any]) -> Any:
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            "model=transformers needs the package transformers, which is not installed; "
            "pip install 'fsdptoys[hf]'"
        )
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = tree.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        import transformers

        raise ValueError(
            f"config.json says model_type={one_line(repr(model_type))}, which transformers "
            f"{transformers.__version__} does not have; code of a folder (auto_map) is never run: "
            "name a folder with a model of transformers"
        )
    if tree.get("quantization_config"):
        raise ValueError(
            "config.json has a quantization_config, and quantized weights are not trained here; "
            "name a folder of the weights before quantization"
        )
    kind = CONFIG_MAPPING[model_type]
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    is_registered = name is None and _is_registered(kind)
    if tree.get("is_encoder_decoder") or not (
        is_registered or (name and not name.endswith("ForConditionalGeneration"))
    ):
        raise ValueError(
            f"config.json says model_type={model_type}, which is no language model of one decoder "
            "alone; name a folder of a causal language model"
        )
    return kind


def _is_registered(kind: Any) -> bool:
    """Whether code that the user named has registered a causal language model with transformers."""
    from transformers import AutoModelForCausalLM

    return kind in AutoModelForCausalLM._model_mapping


def _construct(kind: Any, tree: dict[str, Any]) -> Any:
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        return kind.from_dict(_with_special_floats(tree))
    except Exception as mistake:  # of any kind, as content and classes are foreign
        raise ValueError(
            f"config.json is not accepted by transformers' {kind.__name__} "
            f"({type(mistake).__name__}: {one_line(mistake)}); use the file that came with the "
            "model"
        ) from mistake


def _with_special_floats(value: Any) -> Any:
    """Return a copy with the numbers that JSON lacks, which transformers writes as objects."""
    if isinstance(value, list):
        return [_with_special_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {SPECIAL_FLOAT}:
        return float(value[SPECIAL_FLOAT])
    return {key: _with_special_floats(item) for key, item in value.items()}


def _with_layers(tree: dict[str, Any], kind: Any, layers: int) -> dict[str, Any]:
    """Return a configuration with another number of blocks, and lists of settings for each block
    cut to it."""
    before = _construct(kind, tree).num_hidden_layers
    changed = {
        key: value[:layers]
        if isinstance(value, list) and len(value) == before and layers < before
        else value
        for key, value in tree.items()
    }
    keys = [key for key in LAYER_KEYS if key in tree] or [
        getattr(kind, "attribute_map", {}).get(LAYER_KEYS[0], LAYER_KEYS[0])
    ]
    return changed | dict.fromkeys(keys, layers)


def _randomness(settings: dict[str, Any]) -> list[tuple[str, float]]:
    """Settings that draw random numbers in training, and are not 0."""
    return [
        (key, value)
        for key, value in settings.items()
        if any(part in key for part in RANDOM)
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and value != 0
    ]


def _numbers(config: Any) -> dict[str, int]:
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, list):
        heads = max(heads)
    heads = heads or 1
    dim = config.hidden_size
    kv_heads = getattr(config, "num_key_value_heads", None)
    if isinstance(kv_heads, list):
        kv_heads = max(kv_heads)
    return {
        "dim": dim,
        "n_layers": config.num_hidden_layers,
        "n_heads": heads,
        "n_kv_heads": kv_heads or heads,
        "head_width": getattr(config, "head_dim", None) or dim // heads,
        "vocab_size": config.vocab_size,
        "max_seq_len": getattr(config, "max_position_embeddings", None) or MOST_TOKENS,
    }


def _check_numbers(config: Any) -> None:
    bounds = {
        "dim": MOST_CHANNELS,
        "n_layers": MOST_LAYERS,
        "n_heads": MOST_CHANNELS,
        "n_kv_heads": MOST_CHANNELS,
        "head_width": MOST_CHANNELS,
        "vocab_size": 2**30,
        "max_seq_len": MOST_TOKENS,
    }
    try:
        numbers = _numbers(config)
    except (AttributeError, TypeError, ZeroDivisionError, ValueError) as mistake:
        raise ValueError(
            f"config.json does not say the shape of a language model ({one_line(mistake)}); use "
            "the file that came with the model"
        ) from None
    for key, most in bounds.items():
        value = numbers[key]
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(
                f"config.json says {one_line(value)} for the model's {key}, which must be a whole "
                f"number from 1 to {most}; use the file that came with the model"
            )
