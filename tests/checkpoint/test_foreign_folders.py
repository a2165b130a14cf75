"""Folders of transformers models: read into the adapter, trained from, and written again."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fsdptoys.checkpoint import (
    HuggingFaceFolder,
    named_weights,
    open_init_from,
    read_token_ids,
)
from fsdptoys.cli.convert import training_words
from fsdptoys.cli.main import main
from fsdptoys.errors import ConfigError
from fsdptoys.models import TransformersConfig
from fsdptoys.parallel import (
    DDPConfig,
    FSDP1Config,
    FSDP2Config,
    ParallelConfig,
    ToyZero3Config,
)
from fsdptoys.train.trainer import Trainer
from tests.harness.foreign_families import SETTINGS
from tests.harness.foreign_folders import config_of, load, write, write_original
from tests.harness.foreign_runs import foreign_config
from tests.harness.levels import by_level
from tests.harness.ranks import run_ranks
from tests.harness.transformers_oracle import import_transformers

SHORT = ("llama", "qwen3_moe", "gpt2", "deepseek_v3", "gpt_oss", "gemma3_text")
REFUSED = {
    "apertus": "has a buffer XIELUActivation.beta that transformers computes only where",
    "deepseek_v4": "stores model.layers.0.mlp.gate.tid2eid as torch.int64",
}
"""Families of which no folder is read → why."""
ROWS = by_level([name for name in SETTINGS if name not in REFUSED], SHORT)
TOKENS_BT = torch.arange(2 * 20).view(2, 20) % 250 + 3


def logits_of(original: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = original(input_ids=TOKENS_BT, use_cache=False).logits
    return logits


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.oracle
@pytest.mark.parametrize("family", ROWS)
def test_a_folder_is_read_and_written_as_transformers_does(
    family: str, tmp_path: Path
) -> None:
    """Oracle: transformers' model: its logits to 1e-5; after writing, ``from_pretrained``, which
    misses no key, its weights, logits and config.json, all to the bit."""
    transformers = import_transformers()
    original = write_original(tmp_path / "theirs", family)
    model = load(tmp_path / "theirs")
    with torch.no_grad():
        torch.testing.assert_close(
            model(TOKENS_BT), logits_of(original), rtol=1e-5, atol=1e-5
        )
    write(tmp_path / "ours", model)
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info.values()), info
    assert torch.equal(logits_of(again.eval()), logits_of(original))
    state = again.state_dict()
    for name, tensor in original.state_dict().items():
        assert torch.equal(state[name], tensor), name
    for file in ("config.json", "generation_config.json"):
        trees = [
            json.loads((tmp_path / folder / file).read_text())
            for folder in ("theirs", "ours")
        ]
        assert trees[0] == trees[1]


@pytest.mark.oracle
@pytest.mark.parametrize("family", by_level(REFUSED, ()))
def test_folders_that_cannot_be_read_in_full_are_refused_by_name(
    family: str, tmp_path: Path
) -> None:
    """Oracle: the sentence."""
    import_transformers()
    write_original(tmp_path, family)
    with pytest.raises(ConfigError) as error:
        load(tmp_path)
    assert REFUSED[family] in str(error.value)


@pytest.mark.oracle
def test_only_dtype_and_version_change_in_bfloat16(tmp_path: Path) -> None:
    """Oracle: the source's files; transformers' list of what stays in float32."""
    write_original(tmp_path / "theirs", "deepseek_v3")
    before = json.loads((tmp_path / "theirs" / "config.json").read_text())
    before |= {"custom_key": [1, {"a": None}], "auto_map": {"AutoModel": "code.Model"}}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(before))
    write(tmp_path / "ours", load(tmp_path / "theirs"), torch.bfloat16)
    after = json.loads((tmp_path / "ours" / "config.json").read_text())
    del before["auto_map"]
    assert after == before | {"dtype": "bfloat16"}
    stored = load_file(tmp_path / "ours" / "model.safetensors")
    float32 = {name for name, tensor in stored.items() if tensor.dtype == torch.float32}
    gate = "model.layers.1.mlp.gate"
    assert float32 == {f"{gate}.weight", f"{gate}.e_score_correction_bias"}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A strategy on a number of ranks."""

    parallel: ParallelConfig
    ranks: int


LAYOUTS = {
    "ddp": Layout(DDPConfig(), 2),
    "fsdp1": Layout(FSDP1Config(), 2),
    "fsdp2": Layout(FSDP2Config(), 2),
    "fsdp2 uneven": Layout(FSDP2Config(), 3),
    "toy_zero3": Layout(ToyZero3Config(), 2),
}


def start(config: Any) -> dict[str, Any]:
    """Full weights of a run at its start, as arrays."""
    strategy = Trainer(config).strategy
    weights = itertools.chain(strategy.full_parameters(), strategy.full_buffers())
    return {name: tensor.clone().numpy() for name, tensor in weights}


@pytest.mark.oracle
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "family",
    by_level(("deepseek_v3", "gpt2", "mixtral", "gemma3_text"), ("deepseek_v3",)),
)
def test_every_layout_starts_from_the_weights_of_the_folder(
    family: str, layout: str, tmp_path: Path
) -> None:
    """Oracle: the folder, read in one process."""
    write_original(tmp_path, family)
    expected = dict(named_weights(load(tmp_path)))
    model = dataclasses.replace(config_of(tmp_path), init_from=str(tmp_path))
    row = LAYOUTS[layout]
    config = foreign_config(model, row.parallel, row.ranks)
    (weights, *_) = run_ranks(row.ranks, start, config)
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert torch.equal(torch.from_numpy(tensor), expected[name]), name


def arguments(folder: Path, run: Path, **settings: Any) -> list[str]:
    values = {
        "model": "transformers",
        "model.path": folder,
        "model.init_from": folder,
        "experiment": "null",
        "launch.device": "cpu",
        "train.seq_len": 16,
        "train.steps": 4,
        "checkpoint.every": 2,
        "checkpoint.final_weights": "true",
        "metrics.run_dir": run,
        **settings,
    }
    return ["train", *(f"{key}={value}" for key, value in values.items())]


FSDP1_ON_2 = {"parallel": "fsdp1", "launch.nproc_per_node": 2, "train.batch_size": 2}
SINGLE = {"parallel": "single", "launch.nproc_per_node": 1, "train.batch_size": 4}


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.oracle
def test_a_run_continues_on_another_layout_and_its_weights_are_used_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the run of one process that was not stopped, to 1e-6; the folder's stored buffers, to
    the bit; transformers' greedy text and loss of the written folder."""
    transformers = import_transformers()
    folder = tmp_path / "folder"
    write_original(folder, "deepseek_v3")
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    assert main(arguments(folder, whole, **SINGLE)) == 0
    shutil.copytree(whole, parts)
    for name in ("weights", "checkpoints/step-00000004"):
        shutil.rmtree(parts / name)
    again = {"checkpoint.resume": "auto"}
    assert main(arguments(folder, parts, **FSDP1_ON_2, **again)) == 0
    runs = [
        load_file(run / "weights" / "weights.safetensors") for run in (whole, parts)
    ]
    assert runs[0].keys() == runs[1].keys()
    moved = 0
    start_weights = dict(named_weights(load(folder)))
    for name, tensor in runs[0].items():
        torch.testing.assert_close(runs[1][name], tensor, rtol=1e-6, atol=1e-6)
        moved += not torch.equal(tensor, start_weights[name])
    bias = "layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(runs[1][bias], start_weights[bias])
    assert moved == len(runs[0]) - 1

    out = tmp_path / "out"
    assert main(["convert", "to-hf", str(parts), str(out)]) == 0
    original = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    capsys.readouterr()
    prompt = [5, 6, 7]
    argv = ["--tokenizer", "ids", "--prompt", "5 6 7", "--tokens", "8", "--json"]
    for source in (parts, out):
        assert main(["generate", str(source), *argv, "--temperature", "0"]) == 0
        ids = json.loads(capsys.readouterr().out)[0]["ids"]
        expected = original.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None
        )
        assert ids == expected[0, len(prompt) :].tolist()[: len(ids)]
        assert len(ids) == 8 or ids[-1] in _ends(source)
    text = tmp_path / "text"
    text.write_text(" ".join(map(str, TOKENS_BT[0].tolist())))
    assert (
        main(
            [
                "evaluate",
                str(parts),
                "--tokenizer",
                "ids",
                "--text",
                str(text),
                "--json",
            ]
        )
        == 0
    )
    loss = json.loads(capsys.readouterr().out)["loss"]
    rows = TOKENS_BT[0]
    total = 0.0
    for first in range(0, len(rows) - 1, 16):
        inputs = rows[first : min(first + 16, len(rows) - 1)]
        labels = rows[first + 1 : first + 1 + len(inputs)]
        with torch.no_grad():
            logits = original(input_ids=inputs[None], use_cache=False).logits[0]
        total += torch.nn.functional.cross_entropy(
            logits, labels, reduction="sum"
        ).item()
    assert loss == pytest.approx(total / (len(rows) - 1), rel=1e-5)


def _ends(source: Path) -> list[int]:
    ids = read_token_ids(source).get("eos_token_id", [])
    return ids if isinstance(ids, list) else [ids]


@pytest.mark.oracle
def test_the_command_for_a_folder_names_it_twice(tmp_path: Path) -> None:
    """Oracle: the command, of a family that this project does not have."""
    write_original(tmp_path / "a folder", "mixtral")
    config = HuggingFaceFolder(tmp_path / "a folder").model_config()
    path = str(tmp_path / "a folder")
    assert training_words(config, path) == [
        *("fsdptoys", "train", "model=transformers"),
        *(f"model.path='{path}'", f"model.init_from='{path}'"),
    ]


@pytest.mark.oracle
def test_a_run_says_that_weights_in_its_folder_are_not_used(tmp_path: Path) -> None:
    """Oracle: the sentence; silence where the run starts from them."""
    write_original(tmp_path, "llama")
    config = config_of(tmp_path)
    assert any("holds weights that this run" in note for note in config.notes())
    used = dataclasses.replace(config, init_from=str(tmp_path))
    assert not any("holds weights" in note for note in used.notes())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    import_transformers()
    write_original(tmp_path / "folder", "mixtral")
    return tmp_path / "folder"


def refusal(folder: Path, **settings: Any) -> str:
    config = TransformersConfig(config=_text(folder, **settings), init_from=str(folder))
    with torch.device("meta"):
        model = config.build()
    with pytest.raises(ConfigError) as refused:
        open_init_from(model)
    sentence = str(refused.value).replace(str(folder), "{}")
    assert "\n" not in sentence
    return sentence


def _text(folder: Path, **settings: Any) -> str:
    tree = json.loads((folder / "config.json").read_text())
    return json.dumps(tree | settings)


@pytest.mark.oracle
def test_weights_of_other_settings_are_refused(folder: Path) -> None:
    """Oracle: the sentence, for settings with tensors of the same shapes."""
    assert refusal(folder, num_experts_per_tok=1) == (
        "model.path describes a model with num_experts_per_tok=1, and the weights of "
        "model.init_from={} were made with 2; set model.path to the folder of their own "
        "config.json, and model.config=null"
    )


def edit(folder: Path, change: Any) -> None:
    """Change the tensors of a folder, which gets one file."""
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


W1 = "model.layers.1.block_sparse_moe.experts.3.w1.weight"


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors.pop(W1), f"holds no {W1}, which a transformers model"),
        (
            lambda tensors: tensors.update({W1: torch.zeros(3, 64)}),
            f"holds {W1} in the shape 3×64, and a transformers model",
        ),
        (
            lambda tensors: tensors.update({"model.vision.weight": torch.zeros(3)}),
            "holds model.vision.weight, for which a transformers model as configured has no place",
        ),
        (
            lambda tensors: tensors.update({W1: torch.zeros(128, 64).to(torch.int8)}),
            f"holds {W1} as I8, and weights are read from",
        ),
    ],
    ids=["missing", "shape", "unknown", "integers"],
)
def test_tensors_that_do_not_fit_are_named(
    change: Any, sentence: str, folder: Path
) -> None:
    """Oracle: the name in the folder."""
    edit(folder, change)
    assert sentence in refusal(folder)


@pytest.mark.oracle
def test_pickles_and_code_of_a_folder_never_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: a marker that both would write; status 2 and one sentence for the pickle."""
    marker = folder / "ran"
    code = f"open({str(marker)!r}, 'w').close()\n"
    (folder / "modeling_evil.py").write_text(code)
    (folder / "configuration_evil.py").write_text(code)
    tree = json.loads((folder / "config.json").read_text())
    tree["auto_map"] = {
        "AutoConfig": "configuration_evil.Evil",
        "AutoModelForCausalLM": "modeling_evil.Evil",
    }
    (folder / "config.json").write_text(json.dumps(tree))
    load(folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")
    argv = arguments(folder, folder / "run", **SINGLE)
    assert main(argv) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert "pytorch_model.bin alone, which can run code" in lines[-1]
    assert not marker.exists()


@pytest.mark.oracle
def test_overlapping_tensors_are_refused(folder: Path) -> None:
    """Oracle: the sentence."""
    edit(folder, lambda tensors: None)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    names = [name for name in header if name.endswith(".w1.weight")]
    header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    assert len(text) == size
    file.write_bytes(content[:8] + text + content[8 + size :])
    assert "model.safetensors" in refusal(folder)
