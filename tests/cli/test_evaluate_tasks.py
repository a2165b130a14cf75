"""``fsdptoys evaluate --tasks``: scores are those of lm-eval's own model, and no task file runs
code."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fsdptoys.cli import evaluate_tasks
from fsdptoys.cli.evaluate import evaluate_command
from fsdptoys.cli.task_files import read_tasks
from fsdptoys.errors import ConfigError
from fsdptoys.models import LlamaConfig
from tests.harness.folders import build, write
from tests.harness.transformers_oracle import import_transformers

LETTERS = "abcdefghij ?:"
END = len(LETTERS)
MODEL = LlamaConfig(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    ffn_dim=48,
    vocab_size=END + 1,
    max_seq_len=40,
)
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}:",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": ["a b", "cd", "jij"],
    },
    "whole": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "writes": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}:",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["d", "ab"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
}
DATA = {
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "samples.jsonl"}},
    "test_split": "test",
}


def write_tasks(folder: Path) -> None:
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length in (3, 9, 30, 55, 8, 12):
        ids = torch.randint(len(LETTERS) - 1, (length,), generator=generator)
        question = "".join(LETTERS[index] for index in ids).strip() or "a"
        samples.append({"question": question, "answer": length % 3, "text": "b"})
    lines = "".join(f"{json.dumps(sample)}\n" for sample in samples)
    (folder / "samples.jsonl").write_text(lines)
    (folder / "shared.yaml").write_text(yaml.safe_dump(DATA))
    for name, task in TASKS.items():
        text = yaml.safe_dump({"include": "shared.yaml", **task})
        (folder / f"{name}.yaml").write_text(text)


def write_model(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    write(folder, build(MODEL))
    vocabulary = {letter: index for index, letter in enumerate(LETTERS)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocabulary | {"<e>": END}, unk_token="?")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<e>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"eos_token_id": END}))
    (folder / "checksums.json").unlink()


@pytest.mark.oracle
@pytest.mark.parametrize("few_shot", [0, 1])
def test_scores_are_those_of_lm_evals_own_model(
    few_shot: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: ``lm_eval.models.huggingface`` with the same folder and tasks."""
    evaluator = pytest.importorskip("lm_eval.evaluator")
    for name in evaluate_tasks.OFFLINE:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    transformers = import_transformers()
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    write_tasks(tmp_path / "tasks")
    write_model(tmp_path / "model")
    names = [name for name in TASKS if not (few_shot and name == "whole")]
    argv = [str(tmp_path / "model"), "--tasks", ",".join(names), "--batch", "4"]
    argv += ["--tasks-dir", str(tmp_path / "tasks"), "--device", "cpu"]
    if few_shot:
        samples = [
            {"question": text, "answer": 1, "text": "cab"} for text in ("bad", "jig")
        ]
        for name in names:
            path = tmp_path / "tasks" / f"{name}.yaml"
            task = yaml.safe_load(path.read_text())
            task["fewshot_config"] = {"sampler": "first_n", "samples": samples}
            path.write_text(yaml.safe_dump(task))
    assert evaluate_command([*argv, "--few-shot", str(few_shot)]) == 0
    record = json.loads((tmp_path / "model" / "tasks.json").read_text())

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "model" / "tokenizer.json"), eos_token="<e>"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    oracle = HFLM(
        pretrained=model, tokenizer=tokenizer, max_length=40, batch_size=1, device="cpu"
    )
    expected = evaluator.simple_evaluate(
        oracle,
        tasks=read_tasks(names, str(tmp_path / "tasks"), downloads=False),
        task_manager=TaskManager(include_defaults=False),
        num_fewshot=few_shot,
        bootstrap_iters=1000,
    )["results"]
    assert record["tasks"].keys() == expected.keys()
    for task, measures in record["tasks"].items():
        assert measures == pytest.approx(
            {
                key: value
                for key, value in expected[task].items()
                if key in measures and value != "N/A"
            },
            rel=1e-4,
        ), task
        assert len(measures) > 1


HOSTILE = {
    "function": ("process_docs: !function utils.run", "!function, which runs code"),
    "object": (
        "description: !!python/object/apply:os.system ['true']",
        "cannot be read",
    ),
    "class": ("class: os.system", "has class, which runs code"),
    "unsafe": ("unsafe_code: true", "has unsafe_code, which runs code"),
    "hub": ("dataset_path: someone/data", "takes its data from dataset_path=someone"),
    "address": (
        "dataset_kwargs: {data_files: 'https://example.com/a.jsonl'}",
        "names the data file https://example.com/a.jsonl",
    ),
    "script": (
        "dataset_kwargs: {data_files: samples.jsonl, trust_remote_code: true}",
        "takes its data from",
    ),
    "include": ("include: ../other.yaml", "includes ../other.yaml"),
    "group": ("task: [a, b]", "is a group of tasks"),
    "text": ("- a", "holds no settings"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_task_file_that_would_run_code_or_download_is_refused(
    case: str, tmp_path: Path
) -> None:
    """Oracle: part of the expected sentence; the same task without the line is read, down to its
    metrics, which need the package."""
    line, sentence = HOSTILE[case]
    write_tasks(tmp_path / "tasks")
    path = tmp_path / "tasks" / "choice.yaml"
    lines = [text for text in path.read_text().splitlines() if "include" not in text]
    task = yaml.safe_load("\n".join(lines)) | DATA
    key = line.partition(":")[0]
    task.pop(key, None)
    path.write_text(
        line if case == "text" else f"{yaml.safe_dump(task)}{line}\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError) as error:
        read_tasks(["choice"], str(tmp_path / "tasks"), downloads=False)
    assert sentence in str(error.value)


def test_template_of_a_task_reaches_no_python_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a template that makes a file in jinja2's own environment."""
    pytest.importorskip("lm_eval")
    for name in evaluate_tasks.OFFLINE:
        monkeypatch.setenv(name, "1")
    write_tasks(tmp_path / "tasks")
    write_model(tmp_path / "model")
    path = tmp_path / "tasks" / "choice.yaml"
    mark = tmp_path / "mark"
    template = "{{ cycler.__init__.__globals__.os.system('touch MARK') }}".replace(
        "MARK", str(mark)
    )
    task = yaml.safe_load(path.read_text()) | {"doc_to_text": template}
    path.write_text(yaml.safe_dump(task))
    argv = [str(tmp_path / "model"), "--tasks", "choice", "--device", "cpu"]
    with pytest.raises(ConfigError) as error:
        evaluate_command([*argv, "--tasks-dir", str(tmp_path / "tasks")])
    assert "SecurityError" in str(error.value) and not mark.exists()


MISTAKES = {
    "--limit 3": "--limit 3 is for tasks; add --tasks NAME, or leave it out",
    "--allow-downloads": "--allow-downloads is for tasks; add --tasks NAME, or leave it out",
    "--tasks a --text b": ("--text b is no part of --tasks a; leave out one of them"),
    "--tasks a": (
        "--tasks a are tasks of lm-eval itself, whose data is downloaded; add --allow-downloads, "
        "or --tasks-dir DIR with task files of your own"
    ),
    "--tasks choise --tasks-dir tasks": (
        "--tasks choise has no file tasks/choise.yaml; did you mean choice?"
    ),
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_one_sentence(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the expected message, with a package that is found."""
    monkeypatch.chdir(tmp_path)
    for name in evaluate_tasks.OFFLINE:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(evaluate_tasks.importlib.util, "find_spec", lambda name: True)
    write_tasks(tmp_path / "tasks")
    with pytest.raises(ConfigError) as error:
        evaluate_command([str(tmp_path), *arguments.split()])
    assert str(error.value) == MISTAKES[arguments]


def test_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the expected message."""
    monkeypatch.setattr(evaluate_tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        evaluate_command(["runs/mine", "--tasks", "a"])
    assert str(error.value) == (
        "--tasks a needs the package lm-eval, which is not installed; run pip install -e "
        "'.[lm-eval]'"
    )
