"""The numbers in the answers of docs/toys/questions.md, and CITATION.cff."""

from pathlib import Path
from typing import Any

import torch
import yaml

import fsdptoys
from fsdptoys.config.compose import compose_config
from fsdptoys.toys.buckets import assign_buckets
from scripts.toys_memory import MIB, expected

ROOT = Path(__file__).parents[2]
RANKS = 8


def answers() -> list[str]:
    """The ten answers, on one line each."""
    _, _, text = (ROOT / "docs/toys/questions.md").read_text(encoding="utf-8").partition("## Answers\n")
    found = [" ".join(answer.split()) for answer in text.replace("\n   ", " ").strip().split("\n")]
    assert [answer.partition(".")[0] for answer in found] == [str(number) for number in range(1, 11)]
    return found


def test_answers_have_the_computed_numbers() -> None:
    """Oracle: GPT-2 XL on the meta device, the toys' layouts and buckets, formulas of ``scripts/toys_memory.py``."""
    with torch.device("meta"):
        model = compose_config(["experiment=null", "model=gpt2_xl"]).model.build()
    params = list(model.parameters())
    count = sum(param.numel() for param in params)
    block = sum(param.numel() for param in model.layers[0].parameters())
    rest = count - len(model.layers) * block
    vector = [torch.Size([count])]  # divisible by the ranks: no padding
    kept = [sum(expected(kind, vector, RANKS, 0, 25 * MIB)) for kind in ("ddp", "zero1", "zero2", "fsdp")]
    buckets = assign_buckets(params[::-1], [25 * MIB])
    sent = 4 * count * (RANKS - 1) // RANKS
    rows = [len(chunk) for chunk in params[0].chunk(RANKS)]
    padding = (RANKS * rows[0] - sum(rows)) * params[0].shape[1] * 4
    numbers: dict[int, list[Any]] = {
        1: kept,
        2: [2 * sent, 3 * sent],
        4: [len(buckets), max(param.nbytes for param in params[1:]), params[0].nbytes],
        5: [(4 + 1) / 2],
        6: [2 * len(model.layers) + 1, len(model.layers) + 1],
        7: [4 * block, 4 * rest],
        8: [rows[0], rows[-1], padding],
    }
    for number, values in numbers.items():
        for value in values:
            assert (f"{value:,}" if value >= 10_000 else str(value)) in answers()[number - 1], (number, value)
    page = (ROOT / "docs/toys/questions.md").read_text(encoding="utf-8")
    for value in (count, block, rest):
        assert f"{value:,}" in page


def test_citation_has_the_packages_version_and_licence() -> None:
    """Oracle: the required keys of CFF 1.2.0, the package's version, and pyproject.toml."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys() and cited["cff-version"] == "1.2.0"
    assert cited["version"] == fsdptoys.__version__
    assert f'license = "{cited["license"]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
