"""``fsdptoys verify``: verdicts on real ranks, its pages, and mistakes."""

import json
import re
from pathlib import Path

import pytest

from fsdptoys.cli.main import main
from fsdptoys.verify.judge import Outcome, Verdict
from fsdptoys.verify.rows import ROWS
from fsdptoys.verify.verify import Runner
from tests.harness.levels import by_level, extended

EQUAL = {
    "single",
    *("ddp", "ddp-accum", "fsdp1", "fsdp2", "fsdp2-accum"),
    *("fsdp2-exact", "hsdp-exact"),
    *("checkpointing", "selective", "optimizer-offload", "cpu-offload"),
    *("bf16-single", "bf16-ddp", "bf16-fsdp2"),
}
"""Rows that add two numbers at most, or exactly."""


def rows_of(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, str]:
    """Run a verification; return the outcomes by row."""
    status = main(["verify", *argv, "--json"])
    tree = json.loads(capsys.readouterr().out)
    assert status == tree["status"]
    return {row["row"]: row["outcome"] for row in tree["rows"]}


@pytest.mark.parametrize(
    ("model", "rows"),
    [
        ("llama_debug", "fsdp2-accum,chunked-loss,resume"),
        ("qwen3_moe_debug", "ddp,ep,bf16-fsdp2"),
        *(extended(f"{family}_debug", "all") for family in ("llama", "gpt2")),
        *(extended(f"{name}_debug", "usual") for name in ("llama4", "qwen3")),
        extended("qwen3_moe_debug", "all"),
        extended("llama4_scout", "usual"),
    ],
)
def test_sharding_changes_nothing_for_our_families(
    model: str, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: a loop in plain PyTorch; every bit where each sum adds two numbers."""
    outcomes = rows_of(capsys, model, "--rows", rows, "train.steps=3")
    assert set(outcomes.values()) <= {"equal", "within", "refused"}
    assert {name: outcomes[name] for name in EQUAL & outcomes.keys()} == {
        name: "equal" for name in EQUAL & outcomes.keys()
    }
    if rows not in ("usual", "all"):
        assert "refused" not in outcomes.values()


def test_pages_name_row_verdict_and_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: verdicts in place of training."""
    verdicts = {
        "ddp": Verdict(
            Outcome.within,
            shares=dict.fromkeys(("loss", "gradients"), 1e-7)
            | {"norm": 0.0, "parameters": 2.5e-7},
        ),
        "ep": Verdict(Outcome.refused, "mesh.ep_size=2 has no experts | here"),
        "tp": Verdict(
            Outcome.differs,
            "gradient of a at step 1 has 2 times the norm",
            dict.fromkeys(("loss", "gradients", "norm", "parameters"), 1.0),
            1,
            "gradient of a",
        ),
    }
    monkeypatch.setattr(Runner, "run", lambda self, row: verdicts[row.name])
    rows = ",".join(verdicts)
    for name in ("page.md", "page.html"):
        path = tmp_path / name
        argv = ["verify", "llama_debug", "--rows", rows, "--out", str(path)]
        assert main(argv) == 1
        text = path.read_text(encoding="utf-8")
        for part in ("within 2.5e-07", "gradient of a at step 1", "mesh.ep_size=2"):
            assert part in text
        assert "3 rows: 1 within rounding, 1 different, 1 refused" in text
    out = capsys.readouterr().out
    assert re.search(r"ddp +2 +1.0e-07 +1.0e-07 +0 +2.5e-07 +within 2.5e-07", out)
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["lama_debug"], "neither a model preset nor a folder"),
        (["llama_debug", "gpt2_debug"], "takes one model"),
        (["llama_debug", "model=gpt2_debug"], "both name the model"),
        (["train.steps=2"], "needs a model"),
        (["llama_debug", "--rows", "fsdp3"], "did you mean fsdp2-3?"),
        (["llama_debug", "--ranks", "9"], "--ranks 9 is over 8"),
        (["llama_debug", "tune=lora"], "leave it out"),
        (["llama_debug", "--out", "page.pdf"], "must end in .md"),
        (["llama_debug", "--rows", "ddp", "parallel=fsdp2"], "these set parallel=ddp"),
        (["llama_debug", "train.steps=0"], "train.steps=0"),
    ],
)
def test_a_mistake_ends_with_status_2_and_one_sentence(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the sentence."""
    assert main(["verify", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_rows_have_names_for_the_command_line() -> None:
    """Oracle: the row's own name; every row has a strategy."""
    for name, row in ROWS.items():
        assert re.fullmatch(r"[a-z0-9_-]+", name) and row.name == name
        assert "parallel" in row.settings() and 1 <= row.ranks <= 8


@pytest.mark.parametrize(
    "family", by_level(["llama", "qwen3_moe", "gemma2"], {"qwen3_moe"})
)
def test_a_folder_is_held_against_the_forward_of_transformers(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the class of transformers in a plain loop."""
    pytest.importorskip("transformers")
    from tests.harness.foreign_families import write_config

    folder = write_config(tmp_path / family, family)
    rows = "fsdp1,fsdp2-4,bf16-fsdp2,tp"
    outcomes = rows_of(capsys, str(folder), "--rows", rows, "train.steps=3")
    assert outcomes == {
        "fsdp1": "equal",
        "fsdp2-4": "within",
        "tp": "refused",
        "bf16-fsdp2": "equal",
    }
