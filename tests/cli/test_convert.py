"""``fsdptoys convert``: written files, output and rejected input."""

import contextlib
import dataclasses
import io
import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdptoys.checkpoint import (
    HuggingFaceFolder,
    RunWeights,
    check_same,
    differences,
    verify_checksums,
)
from fsdptoys.cli.convert import convert_command
from fsdptoys.config.compose import compose_config
from fsdptoys.errors import ConfigError
from fsdptoys.models import ModelConfig, whole
from tests.harness.chat_files import CONVERSATIONS, GENERATED, save_chat_tokenizer
from tests.harness.families import CONVERTIBLE, SMALL
from tests.harness.folders import build, load, write
from tests.harness.levels import by_level
from tests.harness.saved_runs import save_run
from tests.harness.transformers_oracle import import_transformers


def output_of(*argv: str) -> str:
    """Output of the command."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert convert_command(list(argv)) == 0
    return printed.getvalue()


def command(output: str) -> list[str]:
    """Overrides of the training command that ``from-hf`` prints."""
    first, second, *overrides = shlex.split(output.splitlines()[-1])
    assert (first, second) == ("fsdptoys", "train")
    return overrides


def preset(name: str) -> ModelConfig:
    return compose_config([f"model={name}"]).model


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("case", CONVERTIBLE)
def test_run_converts_to_a_hugging_face_folder(case: str, tmp_path: Path) -> None:
    """Oracle: the run's parameters and configuration."""
    parameters = save_run(tmp_path / "run", SMALL[case])
    output_of("to-hf", str(tmp_path / "run"), str(tmp_path / "folder"))
    model = load(tmp_path / "folder")
    assert dataclasses.replace(model.config, name=SMALL[case].name) == SMALL[case]
    for name, param in model.named_parameters():
        assert torch.equal(param, parameters[name]), name


def test_output_describes_the_written_files(tmp_path: Path) -> None:
    """Oracle: the exact text; ``weights`` may be given instead of the run, and the files have the
    dtype."""
    save_run(tmp_path / "run", SMALL["llama2"])
    out = tmp_path / "out" / "folder"
    assert output_of(
        "to-hf", str(tmp_path / "run" / "weights"), str(out), "dtype=bfloat16"
    ) == (
        f"wrote {out}: model.safetensors with 88,384 parameters in bfloat16, 176,768 bytes\nload "
        f"it with transformers.AutoModelForCausalLM.from_pretrained('{out}'); a tokenizer is not "
        "in it\n"
    )
    assert {
        tensor.dtype for tensor in load_file(out / "model.safetensors").values()
    } == {torch.bfloat16}
    assert sorted(file.name for file in out.iterdir()) == [
        "checksums.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


@pytest.mark.oracle
def test_tokenizer_is_copied_with_its_chat_template_and_end(tmp_path: Path) -> None:
    """Oracle: transformers' ids of a conversation with the original folder; the checksums cover the
    copies."""
    transformers = import_transformers()
    original = Path(save_chat_tokenizer(tmp_path / "tokenizer", GENERATED["chatml"]))
    save_run(tmp_path / "run", SMALL["llama2"])
    output = output_of(
        "to-hf",
        str(tmp_path / "run"),
        str(tmp_path / "folder"),
        f"tokenizer={original}",
    )
    assert output.endswith(f"; its tokenizer is that of {original}\n")
    ids = [
        transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
            CONVERSATIONS[0]
        )
        for folder in (original, tmp_path / "folder")
    ]
    assert ids[0] == ids[1]
    config = transformers.GenerationConfig.from_pretrained(tmp_path / "folder")
    vocabulary = transformers.AutoTokenizer.from_pretrained(original).get_vocab()
    assert config.eos_token_id == vocabulary["<|im_end|>"]
    assert config.bos_token_id == vocabulary["<s>"]
    assert verify_checksums(tmp_path / "folder") == 5


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "case",
    by_level(SMALL, ("llama2", "qwen3_moe")),
)
def test_printed_command_composes_to_the_model_of_the_folder(
    case: str, tmp_path: Path
) -> None:
    """Oracle: the composed configuration, compared with the folder's; removing one key leaves a
    difference."""
    folder = tmp_path / "a folder's, name"
    config = SMALL[case]
    write(folder, build(config))
    overrides = command(output_of("from-hf", str(folder)))
    composed = compose_config(overrides)
    assert composed.train.seq_len == 128
    assert composed.model.init_from == str(folder)
    assert differences(composed.model, config) == {}
    without = compose_config(overrides[:1] + overrides[2:])
    assert overrides[1].partition("=")[0].removeprefix("model.") in differences(
        without.model, config
    )


def test_closest_preset_is_chosen(tmp_path: Path) -> None:
    """Oracle: the text, for a model that differs from llama_debug in one key."""
    folder = tmp_path / "folder"
    write(
        folder,
        build(dataclasses.replace(preset("llama_debug"), ffn_dim=100)),
        torch.bfloat16,
        max_file_bytes=50_000,
    )
    (folder / "checksums.json").unlink()
    files = len(list(folder.glob("*.safetensors")))
    assert output_of("from-hf", str(folder)) == (
        "family      llama\n"
        "parameters  96,064\n"
        "dtype       bfloat16\n"
        f"files       {files}, whole; no checksums.json\n"
        "values      all finite\n"
        "\n"
        "train from it with:\n"
        f"  fsdptoys train model=llama_debug model.ffn_dim=100 model.init_from={folder}\n"
    )


def test_damaged_weights_are_refused_in_both_directions(tmp_path: Path) -> None:
    """Oracle: the expected messages for a flipped bit and for a NaN; no files are written."""
    save_run(tmp_path / "run", SMALL["llama2"], 2**31)
    file = tmp_path / "run" / "weights" / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 64
    file.write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"weights.safetensors is damaged: its SHA-256 is"
    ):
        convert_command(["to-hf", str(tmp_path / "run"), str(tmp_path / "folder")])
    assert not (tmp_path / "folder").exists()

    model = build(SMALL["llama2"])
    with torch.no_grad():
        model.get_parameter("norm.weight")[3] = torch.nan
    write(tmp_path / "folder", model)
    with pytest.raises(
        ConfigError, match=r"holds model.norm.weight with values that are not finite"
    ):
        convert_command(["from-hf", str(tmp_path / "folder")])


def test_values_too_large_for_the_dtype_are_refused(tmp_path: Path) -> None:
    """Oracle: the expected message, for a value above the largest of float16; bfloat16 has it."""
    save_run(tmp_path / "run", SMALL["llama2"], 2**31)
    folder = tmp_path / "run" / "weights"
    tensors = load_file(folder / "weights.safetensors")
    tensors["norm.weight"][0] = -1e5
    save_file(tensors, folder / "weights.safetensors")
    (folder / "checksums.json").unlink()
    with pytest.raises(ConfigError) as refused:
        convert_command(
            ["to-hf", str(tmp_path / "run"), str(tmp_path / "folder"), "dtype=float16"]
        )
    assert str(refused.value) == (
        "norm.weight holds 100000, too large for float16; set dtype=bfloat16 or dtype=float32"
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run"]
    output_of(
        "to-hf", str(tmp_path / "run"), str(tmp_path / "folder"), "dtype=bfloat16"
    )
    assert (
        load(tmp_path / "folder").get_parameter("norm.weight")[0]
        == torch.tensor(-1e5).bfloat16()
    )


@pytest.mark.parametrize("case", CONVERTIBLE)
@pytest.mark.parametrize("key", ["n_layers", "vocab_size"])
def test_absurd_model_sizes_are_refused_before_modules_are_built(
    case: str, key: str, tmp_path: Path
) -> None:
    """Oracle: one sentence with the key and the value; building 10**12 layers would take days."""
    write(tmp_path / "folder", build(SMALL[case]))
    path = tmp_path / "folder" / "config.json"
    tree = json.loads(path.read_text())
    holder = tree.get("text_config", tree)
    name = SMALL[case].hugging_face.keys[key]
    assert name in holder
    holder[name] = 10**12
    path.write_text(json.dumps(tree))
    with pytest.raises(
        ConfigError,
        match=r"^[^\n]*1000000000000(, not an integer from| must be at most) [^\n]*$",
    ):
        convert_command(["from-hf", str(tmp_path / "folder")])


def test_folder_round_trips_through_a_run_byte_for_byte(tmp_path: Path) -> None:
    """Oracle: the bytes of the first folder."""
    model = build(SMALL["qwen3_moe"])
    write(tmp_path / "first", model)
    again = load(tmp_path / "first")
    parameters = save_run(tmp_path / "run", SMALL["qwen3_moe"])
    for name, param in again.named_parameters():
        assert torch.equal(parameters[name], param)
        assert torch.equal(
            RunWeights(tmp_path / "run").read(name, whole(tuple(param.shape))), param
        )
    output_of("to-hf", str(tmp_path / "run"), str(tmp_path / "second"))
    for name in ("config.json", "model.safetensors", "checksums.json"):
        assert (tmp_path / "first" / name).read_bytes() == (
            tmp_path / "second" / name
        ).read_bytes()
    assert (
        json.loads((tmp_path / "first" / "config.json").read_text())["model_type"]
        == "qwen3_moe"
    )


@pytest.mark.parametrize("chunk_len", [None, 16, 64, 512])
def test_attention_chunk_length_round_trips(
    chunk_len: int | None, tmp_path: Path
) -> None:
    """Oracle: equal configurations, including chunks as long as the context of 128 tokens."""
    config = dataclasses.replace(SMALL["llama4"], attention_chunk_len=chunk_len)
    write(tmp_path / "folder", build(config))
    folder_config = HuggingFaceFolder(tmp_path / "folder").model_config()
    assert differences(config, folder_config) == {}
    longer = dataclasses.replace(config, max_seq_len=4096)
    with (
        contextlib.nullcontext()
        if chunk_len
        else pytest.raises(ConfigError, match=r"set model\.max_seq_len=128")
    ):
        check_same(longer, folder_config, "the folder", "nobody")
