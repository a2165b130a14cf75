"""Incomplete or damaged folders, and those of other models, are rejected without touching the model."""

import pickle
import re
from pathlib import Path

import pytest
import torch

from fsdptoys.checkpoint import HuggingFaceFolder, verify_checksums
from fsdptoys.errors import ConfigError
from fsdptoys.models import ModelConfig
from tests.checkpoint.damages import (
    AGAIN,
    CONFIG,
    DAMAGED_CONFIGS,
    DAMAGED_FILES,
    FIRST,
    GPT2,
    LLAMA4,
    NORM,
    SECOND,
    THIRD,
    Damage,
    Hostile,
    edit_bytes,
    edit_json,
    edit_tensors,
    make_folder,
)
from tests.checkpoint.folders import build_empty


def refusal(folder: Path, config: ModelConfig) -> str:
    """Return the message that rejects a folder; check that the model is unchanged."""
    model = build_empty(config)
    with pytest.raises(ConfigError) as refused:
        source = HuggingFaceFolder(folder)
        source.model_config()
        source.check(model)
    assert all(param.isnan().all() for param in model.parameters())
    with pytest.raises(AssertionError, match="check the folder first"):
        source.fill(next(model.parameters()), "embed_tokens.weight")
    return str(refused.value).replace(str(folder), "{}")


@pytest.mark.parametrize("case", [*DAMAGED_CONFIGS, *DAMAGED_FILES])
def test_damaged_folder_is_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    """Oracle: the message; the model keeps its values, and no pickle is executed."""
    damage, sentence = (DAMAGED_CONFIGS | DAMAGED_FILES)[case]
    folder = tmp_path / "folder"
    make_folder(folder)
    (folder / "checksums.json").unlink()
    assert sorted(file.name for file in folder.glob("*.safetensors")) == [FIRST, SECOND, THIRD]
    damage(folder)
    assert refusal(folder, CONFIG) == sentence
    assert not (folder / "opened").exists()


def test_hostile_pickle_executes_when_loaded(tmp_path: Path) -> None:
    """Oracle: loading it; a harmless pickle would prove nothing above."""
    pickle.loads(pickle.dumps(Hostile(tmp_path / "opened")))
    assert (tmp_path / "opened").exists()


@pytest.mark.parametrize(
    ("config", "key", "value", "message"),
    [
        (LLAMA4, "num_hidden_layers", "2", ": num_hidden_layers is '2', not an integer; correct it"),
        (
            LLAMA4,
            "attention_chunk_size",
            8.0,
            ": attention_chunk_size is 8.0, not an integer from 1 to 1073741824; correct it",
        ),
        (
            LLAMA4,
            "moe_layers",
            [0],
            " says moe_layers=[0], which llama4_text models here do not compute (only [0, 1], as its "
            "other keys say); use weights of another model",
        ),
        (GPT2, "n_inner", "x", ": n_inner is 'x', not an integer from 1 to 4194304; correct it"),
        (
            GPT2,
            "scale_attn_by_inverse_layer_idx",
            True,
            " says scale_attn_by_inverse_layer_idx=True, which gpt2 models here do "
            "not compute (only False); use weights of another model",
        ),
    ],
)
def test_other_families_refuse_their_own_keys(
    config: ModelConfig, key: str, value: object, message: str, tmp_path: Path
) -> None:
    """Oracle: the expected message."""
    make_folder(tmp_path / "folder", config)
    edit_json("config.json", **{key: value})(tmp_path / "folder")
    (tmp_path / "folder" / "checksums.json").unlink()
    assert refusal(tmp_path / "folder", config) == f"{{}}/config.json{message}"


CHANGED = "or delete checksums.json if the file was changed on purpose"


@pytest.mark.parametrize(
    ("damage", "checked", "sentence"),
    [
        (
            edit_bytes(lambda content: content[:-1] + bytes([content[-1] ^ 1])),
            "values",
            rf"\{{}}/{THIRD} is damaged: its SHA-256 is [0-9a-f]{{12}}…, and checksums.json says [0-9a-f]{{12}}…; "
            f"{AGAIN}, {CHANGED}",
        ),
        (
            edit_bytes(lambda content: content + b" ", "config.json"),
            "sizes",
            rf"\{{}}/config.json is damaged: it holds \d+ bytes, and checksums.json says \d+; {AGAIN}, {CHANGED}",
        ),
        (
            lambda folder: (folder / FIRST).unlink(),
            "sizes",
            rf"\{{}}/{FIRST} is missing, though checksums.json lists it; {AGAIN}",
        ),
        (
            edit_json("checksums.json", files={"../x": {"bytes": 1, "sha256": ""}}),
            "sizes",
            rf"\{{}}/checksums.json is damaged: it does not list names, sizes and SHA-256; {AGAIN}",
        ),
        (
            edit_json("checksums.json", files=["x"]),
            "sizes",
            rf"\{{}}/checksums.json is damaged: it does not list names, sizes and SHA-256; {AGAIN}",
        ),
    ],
    ids=["flipped bit", "changed config", "missing file", "path to elsewhere", "list"],
)
def test_checksums_identify_changed_files(damage: Damage, checked: str, sentence: str, tmp_path: Path) -> None:
    """Oracle: the message. Sizes are looked at before a run, sums where all is read; a flipped bit has its size."""
    folder = tmp_path / "folder"
    make_folder(folder)
    damage(folder)
    source, model = HuggingFaceFolder(folder), build_empty(CONFIG)
    with pytest.raises(ConfigError) as refused:
        if checked == "values":
            source.check(model)
        else:
            with pytest.raises(ConfigError):
                source.check(model)
        verify_checksums(source.path)
    assert re.fullmatch(sentence, str(refused.value).replace(str(folder), "{}"))


def test_non_finite_values_are_reported(tmp_path: Path) -> None:
    """Oracle: the expected message, for one NaN among many; after a check of all other values of the folder."""
    folder = tmp_path / "folder"
    make_folder(folder)
    source = HuggingFaceFolder(folder)
    source.check(build_empty(CONFIG))
    source.check_values()
    edit_tensors(lambda tensors: tensors[NORM][15:].fill_(torch.inf))(folder)
    with pytest.raises(ConfigError, match=f"{THIRD} holds {NORM} with values that are not finite; use other weights"):
        source.check_values()
