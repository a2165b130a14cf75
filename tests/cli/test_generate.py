"""``fsdptoys generate``: output and error messages; and adapters in all commands that use
weights."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
import torch

from fsdptoys.cli.generate import generate_command
from fsdptoys.cli.main import main
from fsdptoys.data import DataConfig
from fsdptoys.data.byte_text import TextConfig
from fsdptoys.data.hf import HFConfig
from fsdptoys.data.prepare import prepare_folder
from fsdptoys.data.prepared import PreparedConfig
from fsdptoys.errors import ConfigError
from fsdptoys.models import LlamaConfig
from fsdptoys.models.generate import Draw, generate
from tests.harness import prepared_data as prepared
from tests.harness.adapters import adapted, draw_adapters, write_own
from tests.harness.byte_model import BYTES, save_model, save_tokenizer, train_on
from tests.harness.chat_files import GENERATED, save_chat_tokenizer, without_blocks
from tests.harness.families import SMALL
from tests.harness.folders import build, load, write
from tests.harness.transformers_oracle import import_transformers


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run of ``train.seq_len=16``, and the same weights in Hugging Face
    format."""
    save_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def generated_ids(capsys: pytest.CaptureFixture[str], line: str) -> list[list[int]]:
    """Ids generated for each prompt."""
    assert generate_command([*shlex.split(line), "--device", "cpu", "--json"]) == 0
    return [entry["ids"] for entry in json.loads(capsys.readouterr().out)]


def expected(prompt: list[int], count: int, context: int, draw: Draw) -> list[int]:
    tokens_T = generate(build(BYTES), torch.tensor(prompt), count, context, draw)
    return tokens_T[len(prompt) :].tolist()


@pytest.mark.parametrize("source", ["run", "run/weights", "folder"])
def test_every_source_generates_the_text_of_its_weights(
    source: str, places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the loop of ``sampling`` with the saved model, one prompt at a time."""
    line = f"{source} --prompt ab --prompt=--c --tokens 8 --context 16 --temperature 0"
    ids = generated_ids(capsys, f"{line} --tokenizer bytes")
    assert ids == [expected(list(text), 8, 16, Draw(0.0)) for text in (b"ab", b"--c")]


def test_each_option_has_its_effect(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the loop of ``sampling`` with the same settings, each of which gives different
    text."""
    outputs = set()
    for options, context, draw in [
        ("", 16, Draw()),  # the run's train.seq_len
        ("--context 3", 3, Draw()),
        ("--temperature 0.5", 16, Draw(0.5)),
        ("--top-k 3", 16, Draw(top_k=3)),
        ("--top-p 0.4", 16, Draw(top_p=0.4)),
        ("--seed 7", 16, Draw(seed=7)),
    ]:
        (ids,) = generated_ids(
            capsys, f"run --prompt '97 98' --tokenizer ids --tokens 20 {options}"
        )
        assert ids == expected([97, 98], 20, context, draw), options
        outputs.add(tuple(ids))
    assert len(outputs) == 6


def test_generation_runs_in_the_requested_dtype(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the loop with the model cast to bfloat16, except its rotary frequencies."""
    model = build(BYTES).to(torch.bfloat16)
    model.init_buffers(torch.device("cpu"))
    tokens_T = generate(model, torch.tensor([97, 98]), 12, 64, Draw())
    line = "folder --prompt '97 98' --tokenizer ids --tokens 12 --dtype bfloat16"
    assert generated_ids(capsys, line) == [tokens_T[2:].tolist()]


def test_texts_are_printed_with_their_prompts(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the ids, as the tokenizer of ids writes them; without the speed."""
    line = (
        "generate run --prompt '1 2' --prompt 3 --tokens 4 --tokenizer ids --device cpu"
    )
    assert main(shlex.split(line)) == 0
    printed = capsys.readouterr()
    lines = [
        " ".join(map(str, [*ids, *expected(ids, 4, 16, Draw())]))
        for ids in ([1, 2], [3])
    ]
    assert printed.out == "\n\n".join(lines) + "\n"
    assert printed.err.startswith("fsdptoys: 8 tokens in ")


def test_text_ends_at_the_end_token_of_the_folder(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the same text cut after its third token, which the folder declares as the end
    token."""
    line = "folder --prompt ab --tokenizer bytes --tokens 8 --temperature 0"
    (whole,) = generated_ids(capsys, line)
    (places / "folder" / "checksums.json").unlink()
    (places / "folder" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [whole[2]]})
    )
    assert generated_ids(capsys, line) == [whole[: whole.index(whole[2]) + 1]]


def test_diverged_model_is_reported(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the exit status and the message."""
    model = build(BYTES)
    with torch.no_grad():
        model.get_parameter("norm.weight").fill_(3e38)
    write(places / "broken", model)
    line = "generate broken --prompt 1 --tokenizer ids --device cpu"
    assert main(shlex.split(line)) == 1
    printed = capsys.readouterr()
    assert printed.out == "1\n" and "the model's logits were not finite" in printed.err


@pytest.mark.oracle
@pytest.mark.parametrize("case", ["llama3 scaled tied", "qwen3", "qwen3_moe", "gpt2"])
def test_greedy_text_equals_transformers(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: transformers' own generation, with its own cache, from the same folder."""
    transformers = import_transformers()
    folder = tmp_path / "folder"
    write(folder, build(SMALL[case]))
    line = (
        f"{folder} --prompt '5 17 80 3 44' --tokenizer ids --tokens 40 --temperature 0"
    )
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids_BT = torch.tensor([[5, 17, 80, 3, 44]])
    wanted_BT = oracle.generate(ids_BT, max_new_tokens=40, do_sample=False)
    assert generated_ids(capsys, line) == [wanted_BT[0, 5:].tolist()]


def test_tokenizer_of_the_folder_is_the_default(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the ids of the words, by hand; a run may be given the same one."""
    save_tokenizer(places / "folder")
    (places / "folder" / "checksums.json").unlink()
    text_line = "--prompt 'two one' --tokens 5 --context 16"
    ids = "--prompt '1 0' --tokens 5 --context 16 --tokenizer ids"
    assert generated_ids(capsys, f"folder {text_line}") == generated_ids(
        capsys, f"folder {ids}"
    )
    assert generated_ids(
        capsys, f"run {text_line} --tokenizer folder"
    ) == generated_ids(capsys, f"run {ids}")


@pytest.mark.oracle
@pytest.mark.parametrize("system", [None, "Be brief. é"])
def test_chat_prompt_is_that_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], system: str | None
) -> None:
    """Oracle: ids of ``apply_chat_template`` with the prompt of an answer, continued by the loop of
    ``sampling``."""
    transformers = import_transformers()
    model = build(dataclasses.replace(BYTES, vocab_size=320))
    folder = tmp_path / "folder"
    write(folder, model)
    save_chat_tokenizer(folder, without_blocks(GENERATED["headers"]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": "hello é"})
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    end = frozenset([tokenizer.convert_tokens_to_ids("<|im_end|>")])
    expected_ids = generate(model, torch.tensor(prompt), 12, 64, Draw(0.0), end)[
        len(prompt) :
    ].tolist()
    option = f"--system '{system}'" if system is not None else ""
    line = f"{folder} --chat --prompt 'hello é' --tokens 12 --temperature 0 {option}"
    assert generated_ids(capsys, line) == [expected_ids]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('no system') if messages[0].role == 'system' }}a",
            r"after --system 'Hi' .*no system",
        ),
        (
            "{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}",
            r"--system 'Hi' is left out by",
        ),
    ],
)
def test_system_message_that_no_model_would_see_is_refused(
    tmp_path: Path, template: str, message: str
) -> None:
    """Oracle: templates by hand."""
    pytest.importorskip("tokenizers")
    write(tmp_path / "folder", build(dataclasses.replace(BYTES, vocab_size=320)))
    save_chat_tokenizer(tmp_path / "folder", template)
    with pytest.raises(ConfigError, match=message):
        generate_command(
            [str(tmp_path / "folder"), "--chat", "--system", "Hi", "--prompt", "a"]
        )


@pytest.mark.parametrize("kind", ["folder", "cache"])
def test_tokenizer_of_the_run_is_the_default(
    kind: str, places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the ids of the words, by hand; the tokenizer's own file is gone."""
    pytest.importorskip("tokenizers")
    tokenizer = Path(prepared.save_tokenizer(places / "tokenizer", None))
    prepared.write_lines(places / "a.jsonl", ["one two"])
    data: DataConfig = PreparedConfig(folder="out")
    if kind == "folder":
        prepare_folder(
            prepared.request(places / "out", "a.jsonl", tokenizer=str(tokenizer))
        )
    else:
        data = HFConfig(
            files=["a.jsonl"], tokenizer=str(tokenizer), cache="cache", processes=1
        )
        data.prepare(1, 256)
    (tokenizer / "tokenizer.json").unlink()
    train_on(places / "run", data)
    text_line = "run --tokens 5 --prompt 'one two one <|endoftext|>'"
    ids = "run --tokens 5 --prompt '2 3 2 5 7 6' --tokenizer ids"
    assert generated_ids(capsys, text_line) == generated_ids(capsys, ids)


def test_runs_trained_on_bytes_default_to_bytes(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the same command with an explicit tokenizer, for every kind of byte data."""
    prepared.write_lines(places / "a.jsonl", ["one two"])
    prepare_folder(prepared.request(places / "out", "a.jsonl"))
    line = "run --tokens 5 --prompt abc"
    expected_ids = generated_ids(capsys, f"{line} --tokenizer bytes")
    for data in (TextConfig(), PreparedConfig(folder="out"), HFConfig(files=["gone"])):
        train_on(places / "run", data)
        assert generated_ids(capsys, line) == expected_ids


def test_adapters_are_added_to_the_weights_of_every_command(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the logits of the model with adapters, for a converted folder; that folder, for the
    other commands."""
    model = adapted(build(BYTES))
    write_own(places / "adapter", model, draw_adapters(model))
    (places / "text").write_text("some text to predict, a few words long")
    assert main(["convert", "to-hf", "run", "merged", "adapter=adapter"]) == 0
    tokens_BT = torch.arange(40).view(2, 20)
    merged = load(places / "merged")(tokens_BT)
    torch.testing.assert_close(merged, model(tokens_BT), rtol=1e-5, atol=1e-5)
    for line in (
        "generate SOURCE --prompt ab --tokens 8",
        "evaluate SOURCE --text text",
    ):
        answers = []
        for source in ("folder", "folder --adapter adapter", "merged"):
            capsys.readouterr()
            argv = f"{line} --device cpu --tokenizer bytes --context 16 --json"
            assert main(argv.replace("SOURCE", source).split()) == 0
            answers.append(json.loads(capsys.readouterr().out))
        assert answers[1] == answers[2] != answers[0]


def test_adapters_of_another_model_are_refused(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: status 2 and the message."""
    model = adapted(build(BYTES))
    write_own(places / "adapter", model, draw_adapters(model))
    write(
        places / "wide", build(LlamaConfig(**vars(BYTES) | {"dim": 64, "head_dim": 8}))
    )
    assert (
        main(
            [
                "generate",
                "wide",
                "--adapter",
                "adapter",
                "--prompt",
                "a",
                "--tokenizer",
                "bytes",
            ]
        )
        == 2
    )
    assert (
        "lora_A.weight in the shape 4×32, and the adapter of a llama model as configured needs 4×64"
        in (capsys.readouterr().err)
    )
