"""Configurations of transformers models: what is read, refused and never followed."""

import json
from pathlib import Path
from typing import Any

import pytest

from fsdptoys.checkpoint import model_config_of
from fsdptoys.config.compose import compose_config
from fsdptoys.errors import ConfigError
from fsdptoys.models import TransformersConfig
from fsdptoys.models.foreign.json_text import config_text
from fsdptoys.parallel import FSDP2Config, SingleConfig
from fsdptoys.parallel.determinism import Deterministic
from tests.harness.foreign_families import tiny_config, write_config
from tests.harness.foreign_runs import foreign_config, tiny_model
from tests.harness.tiny import refusal
from tests.harness.transformers_oracle import import_transformers

pytestmark = pytest.mark.oracle
LLAMA = tiny_config("llama")

HOSTILE: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "cannot be read as JSON"),
    "no object": ("[1]", "it is not an object"),
    "too deep": ("[" * 100_000, "cannot be read as JSON"),
    "no model type": ("{}", "model_type=None, which transformers"),
    "code of its own": (
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}),
        "auto_map) is never run",
    ),
    "quantized": (
        json.dumps(LLAMA | {"quantization_config": {"quant_method": "fp8"}}),
        "quantized weights are not trained",
    ),
    "an encoder": (
        json.dumps({"model_type": "t5"}),
        "no language model of one decoder",
    ),
    "later tokens": (json.dumps({"model_type": "bert"}), "sees later tokens"),
    "images": (
        json.dumps({"model_type": "gemma3"}),
        "no language model of one decoder",
    ),
    "a number beyond memory": (
        json.dumps(LLAMA | {"intermediate_size": 2**60}),
        "holds a number above",
    ),
    "a million layers": (
        json.dumps(LLAMA | {"num_hidden_layers": 10**6}),
        "from 1 to 10000",
    ),
    "no layers": (json.dumps(LLAMA | {"num_hidden_layers": 0}), "from 1 to 10000"),
    "text for a number": (
        json.dumps(LLAMA | {"hidden_size": "wide"}),
        "is not accepted by transformers' LlamaConfig",
    ),
    "a list for a number": (
        json.dumps(LLAMA | {"vocab_size": [1]}),
        "is not accepted by transformers' LlamaConfig",
    ),
    "experts that are drawn": (
        json.dumps({"model_type": "phimoe", "router_jitter_noise": 0.01}),
        "draws experts in training",
    ),
    "an unknown activation": (
        json.dumps(LLAMA | {"hidden_act": "__import__('os')"}),
        "transformers cannot build a model of type llama",
    ),
}


def compose(folder: Path, *overrides: str) -> Any:
    config = compose_config(
        ["model=transformers", f"model.path={folder}", "parallel=single", *overrides]
    )
    config.validate(1, "cpu")
    return config


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_configurations_end_in_one_sentence(name: str, tmp_path: Path) -> None:
    """Oracle: a ConfigError of one line."""
    import_transformers()
    text, sentence = HOSTILE[name]
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        compose(tmp_path)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_folder_and_a_missing_path_are_named(tmp_path: Path) -> None:
    """Oracle: the sentences."""
    with pytest.raises(ConfigError, match=r"set model\.path=FOLDER"):
        compose_config(["model=transformers"])
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        compose(tmp_path / "nowhere")


def test_names_of_code_and_implementations_are_dropped() -> None:
    """Oracle: the text that a run keeps."""
    tree = LLAMA | {
        "auto_map": {"AutoModelForCausalLM": "mine.Model"},
        "_attn_implementation": "someone/kernel",
        "dtype": "bfloat16",
        "nested": {"attn_implementation": "someone/kernel", "kept": 1},
    }
    stored = json.loads(config_text(tree, "config.json"))
    assert stored["nested"] == {"kept": 1}
    assert set(stored) == set(LLAMA) | {"nested"}


def test_a_run_is_read_without_its_folder(tmp_path: Path) -> None:
    """Oracle: the settings of the run, before the folder went away."""
    import_transformers()
    folder = write_config(tmp_path / "model", "qwen3_moe")
    model = compose(folder, "model.layers=1").model
    section = {"family": model.family, **vars(model)}
    (folder / "config.json").unlink()
    stored = model_config_of(section, "config.yaml", "")
    assert stored == model
    assert stored.n_layers == 1
    assert len(stored.build().layers) == 1


@pytest.mark.parametrize(
    ("family", "layers"), [("gemma3_text", 1), ("gpt2", 1), ("llama", 3)]
)
def test_layers_replaces_the_number_of_blocks(family: str, layers: int) -> None:
    """Oracle: the blocks of the built model."""
    import_transformers()
    text = config_text(tiny_config(family), "config.json")
    model = TransformersConfig(config=text, layers=layers)
    model.check()
    assert len(model.build().layers) == model.n_layers == layers


def test_dropout_is_zero_and_said() -> None:
    """Oracle: the built modules, and the sentence."""
    import_transformers()
    model = tiny_model("gpt2", resid_pdrop=0.1, attn_pdrop=0.2)
    model.check()
    notes = " ".join(model.notes())
    assert "resid_pdrop is 0 in this run, and 0.1 in config.json" in notes
    assert "attn_pdrop" in notes
    assert all(
        getattr(module, "p", 0.0) == 0.0
        for module in model.build().modules()
        if type(module).__name__ == "Dropout"
    )


REFUSED: dict[str, dict[str, Any]] = {
    "mesh.tp_size": {"tp_size": 2},
    "mesh.pp_size": {"pp_size": 2},
    "mesh.ep_size": {"ep_size": 2},
}


@pytest.mark.parametrize("key", REFUSED)
def test_settings_that_are_not_built_are_refused_by_name(key: str) -> None:
    """Oracle: the sentence, with key and model."""
    import_transformers()
    sentence = refusal(FSDP2Config(), 2, model=tiny_model("llama"), **REFUSED[key])
    assert sentence.startswith(f"{key}=2 ")
    assert "is not built for model=llama" in sentence


def test_layout_mode_is_refused_by_name() -> None:
    """Oracle: the sentence."""
    import_transformers()
    with pytest.raises(ConfigError, match="operations of its own, which model=llama"):
        foreign_config(
            tiny_model("llama"), SingleConfig(), 1, deterministic=Deterministic.layout
        )
