"""Folders in Hugging Face format: round trips, and weights to start from."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdptoys.checkpoint import (
    HuggingFaceFolder,
    open_init_from,
    verify_checksums,
)
from fsdptoys.cli.convert import training_words
from fsdptoys.cli.main import main
from fsdptoys.errors import ConfigError
from fsdptoys.models import GPT2Config, LlamaConfig, ModelConfig
from fsdptoys.models.rope_scaling import RopeScaling
from tests.checkpoint.damages import (
    CONFIG,
    GPT2,
    SENTENCES,
    THIRD,
    edit_bytes,
    make_folder,
)
from tests.harness.families import CONVERTIBLE, SMALL
from tests.harness.folders import build, build_empty, load, write
from tests.harness.saved_runs import FILE_BYTES
from tests.harness.transformers_oracle import import_transformers

TOKENS_BT = torch.arange(2 * 33).view(2, 33) % 96


def named_like(config: ModelConfig, other: ModelConfig) -> ModelConfig:
    """With the fields that ``config.json`` does not hold."""
    return dataclasses.replace(config, name=other.name)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.oracle
@pytest.mark.parametrize("case", CONVERTIBLE)
def test_transformers_loads_our_folders(case: str, tmp_path: Path) -> None:
    """Oracle: transformers' from_pretrained on a sharded folder of ours: no key left over, logits
    to 1e-5."""
    transformers = import_transformers()
    model = build(SMALL[case])
    summary = write(tmp_path / "ours", model, max_file_bytes=FILE_BYTES)
    assert len(summary.files) > 2

    oracle, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info.values()), info
    assert type(oracle).__name__ == model.config.hugging_face.architecture
    assert oracle.dtype == torch.float32
    torch.testing.assert_close(
        model(TOKENS_BT),
        oracle(TOKENS_BT, use_cache=False).logits,
        rtol=1e-5,
        atol=1e-5,
    )
    # The settings are equal after transformers has read and written them, without token ids.
    oracle.save_pretrained(tmp_path / "theirs")
    assert (
        named_like(HuggingFaceFolder(tmp_path / "theirs").model_config(), model.config)
        == model.config
    )
    assert (
        oracle.generation_config.eos_token_id is None
        and oracle.config.bos_token_id is None
    )


@pytest.mark.parametrize("case", CONVERTIBLE)
@pytest.mark.parametrize("file_bytes", [2**31, FILE_BYTES])
def test_our_folders_round_trip_bitwise(
    case: str, file_bytes: int, tmp_path: Path
) -> None:
    """Oracle: the parameters before saving; a second save writes identical files."""
    model = build(SMALL[case])
    write(tmp_path / "first", model, max_file_bytes=file_bytes)
    again = load(tmp_path / "first")
    assert named_like(again.config, model.config) == model.config
    for (name, param), other in zip(
        model.named_parameters(), again.parameters(), strict=True
    ):
        assert torch.equal(param, other), name

    write(tmp_path / "second", again, max_file_bytes=file_bytes)
    contents = [
        {file.name: file.read_bytes() for file in (tmp_path / f).iterdir()}
        for f in ("first", "second")
    ]
    assert contents[0] == contents[1]
    assert verify_checksums(tmp_path / "first") == len(contents[0]) - 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_are_converted_on_saving_and_loading(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Oracle: PyTorch's own conversion, on saving and on loading, into any dtype of the
    parameter."""
    model = build(SMALL["gpt2"])
    write(tmp_path / "folder", model, dtype)
    assert (
        json.loads((tmp_path / "folder" / "config.json").read_text())["torch_dtype"]
        == str(dtype)[6:]
    )
    source = HuggingFaceFolder(tmp_path / "folder")
    source.check(model)
    for param_dtype in (torch.float32, torch.bfloat16):
        for name, param in model.named_parameters():
            filled = torch.full_like(param, torch.nan, dtype=param_dtype)
            source.fill(filled, name)
            assert torch.equal(filled, param.detach().to(dtype).to(param_dtype)), name


def test_names_may_lack_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    """Oracle: the folder with full names; the published GPT-2 has names like these, and masks that
    nothing needs."""
    model = build(
        GPT2Config(dim=16, n_layers=1, n_heads=2, vocab_size=32, max_seq_len=16)
    )
    write(tmp_path / "folder", model)
    file = tmp_path / "folder" / "model.safetensors"
    bare = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(file).items()
    }
    masks = {
        "h.0.attn.bias": torch.ones(1, 1, 16, 16, dtype=torch.uint8),
        "h.0.attn.masked_bias": torch.ones(()),
    }
    save_file(bare | masks, file)
    (tmp_path / "folder" / "checksums.json").unlink()
    for (name, param), other in zip(
        model.named_parameters(), load(tmp_path / "folder").parameters(), strict=True
    ):
        assert torch.equal(param, other), name


def test_stored_head_of_tied_embeddings_must_equal_the_embedding(
    tmp_path: Path,
) -> None:
    """Oracle: the embedding; a head with other values is rejected once values are read."""
    config = LlamaConfig(
        dim=16,
        n_layers=1,
        n_heads=2,
        n_kv_heads=1,
        ffn_dim=24,
        vocab_size=32,
        max_seq_len=16,
        tie_embeddings=True,
    )
    model = build(config)
    write(tmp_path / "folder", model)
    file = tmp_path / "folder" / "model.safetensors"
    (tmp_path / "folder" / "checksums.json").unlink()
    tensors = load_file(file)
    source = HuggingFaceFolder(tmp_path / "folder")
    for factor in (1, 2):
        save_file(
            {
                **tensors,
                "lm_head.weight": tensors["model.embed_tokens.weight"] * factor,
            },
            file,
        )
        source.check(build_empty(config))
        if factor == 1:
            source.check_values()
    with pytest.raises(
        ValueError,
        match=r"holds lm_head.weight with other values than model.embed_tokens.weight",
    ):
        source.check_values()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    make_folder(tmp_path / "weights")
    return tmp_path / "weights"


@pytest.mark.parametrize("row", SENTENCES["weights of other models"], ids=str)
def test_weights_of_another_model_are_refused(
    row: dict[str, Any], tmp_path: Path
) -> None:
    """Oracle: the expected message, also for configurations with weights of the same shapes."""
    make_folder(tmp_path / "weights")
    make_folder(tmp_path / "gpt2", GPT2)
    (tmp_path / "file").touch()
    changes = {"init_from": "{}/weights"} | row["changes"]
    if "rope_scaling" in changes:
        changes["rope_scaling"] = RopeScaling(**changes["rope_scaling"])
    changes["init_from"] = changes["init_from"].replace("{}", str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        open_init_from(dataclasses.replace(CONFIG, **changes).build())
    assert str(refused.value).replace(str(tmp_path), "{}") == row["says"]


@pytest.mark.parametrize(
    "changes",
    [{}, {"name": "x", "init_std": 1.0}, {"max_seq_len": 512}, {"head_dim": 8}],
    ids=str,
)
def test_settings_unrelated_to_weights_may_differ(
    changes: dict[str, Any], weights: Path
) -> None:
    """Oracle: the same weights."""
    model = dataclasses.replace(CONFIG, init_from=str(weights), **changes).build()
    source = open_init_from(model)
    expected = build(CONFIG)
    for name, param in model.named_parameters():
        source.fill(param, name)
        assert torch.equal(param, expected.get_parameter(name))


def test_damaged_folder_is_refused_before_workers_start(
    weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: status 2 and the file's name, for one bit that only the checksums know of."""
    edit_bytes(lambda content: content[:-1] + bytes([content[-1] ^ 1]))(weights)
    _, *overrides = training_words(CONFIG, str(weights))
    assert main([*overrides, "experiment=null"]) == 2
    assert f"{weights / THIRD} is damaged: its SHA-256 is" in capsys.readouterr().err
