"""A run that tunes a model and names no steps: one pass over its data, and four evaluations."""

import json
from pathlib import Path

import pytest
import torch

from fsdptoys.cli.main import main
from fsdptoys.config.compose import compose_config
from fsdptoys.config.schema import Config
from fsdptoys.data.sampler import BatchStream
from fsdptoys.errors import ConfigError
from tests.harness.byte_model import save_model
from tests.harness.resumed_runs import metrics_of

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"{n} + 1?"},
            {"role": "assistant", "content": f"{n + 1}"},
        ]
    }
    for n in range(23)
]
MODEL = ["model=llama_bytes", "model.dim=32", "model.n_layers=2", "model.n_heads=4",
         "model.n_kv_heads=2", "model.ffn_dim=48", "model.vocab_size=256", "model.max_seq_len=64",
         "model.init_from=folder"]  # fmt: skip
DATA = [
    "data=chat",
    "data.files=[rows.jsonl]",
    "data.template=chatml",
    "data.cache=cache",
    "data.processes=1",
]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model and rows."""
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in ROWS)
    )
    return tmp_path


def prepared(overrides: list[str], world_size: int) -> Config:
    """A validated configuration with prepared data and counted steps."""
    config = compose_config([*MODEL, *DATA, "launch.device=cpu", *overrides])
    config.validate(world_size, "cpu")
    config.data.prepare(config.train.seq_len, config.model.vocab_size)
    config.count_steps(world_size)
    return config


@pytest.mark.parametrize(
    ("overrides", "ranks", "data_ranks"),
    [
        (["parallel=single"], 1, 1),
        (["parallel=single", "parallel.simulated_ranks=3"], 1, 3),
        (["parallel=fsdp2", "train.batch_size=2", "train.grad_accum=3"], 2, 2),
        (["parallel=fsdp2", "mesh.cp_size=2", "data.mask_documents=false"], 4, 2),
        (
            [
                "parallel=fsdp2",
                "mesh.pp_size=2",
                "data.packing=none",
                "train.grad_accum=2",
            ],
            4,
            2,
        ),
        (["parallel=single", "data.eval_fraction=0.3"], 1, 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
@pytest.mark.usefixtures("workspace")
def test_steps_without_a_number_see_each_row_once(
    overrides: list[str], ranks: int, data_ranks: int
) -> None:
    """Oracle: the sampler: the last step meets the last row, and a held-out part is evaluated at
    most four times."""
    config = prepared(overrides, ranks)
    train = config.train
    assert train.data_seed is not None
    samples = config.data.build(
        train.seq_len, config.model.vocab_size, train.data_seed
    ).train
    everyone = range(data_ranks)
    stream = BatchStream(
        samples,
        train.batch_size,
        train.grad_accum,
        everyone,
        data_ranks,
        train.data_seed,
    )
    numbers: list[int] = []
    for _ in range(train.steps):
        assert len(set(numbers)) < len(samples)
        numbers += torch.cat(stream.sample_numbers()).tolist()
        stream.next_step()
    assert len(set(numbers)) >= len(samples)
    times = 0 if train.eval_every == 0 else -(-train.steps // train.eval_every)
    assert (times > 0) == ("data.eval_fraction=0.3" in overrides) and times <= 4


@pytest.mark.usefixtures("unmeasured")
def test_run_says_how_many_steps_its_pass_has(
    workspace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the lines of metrics, a held-out loss among them, and the resumed run's, which counts
    the same."""
    argv = [
        "train",
        *MODEL,
        *DATA,
        "data.eval_fraction=0.3",
        "launch.device=cpu",
        "parallel=single",
    ]
    argv += [
        "metrics.run_dir=tuned",
        "metrics.console=none",
        "plan.predict=false",
        "checkpoint.every=2",
    ]
    assert main(argv) == 0
    lines = metrics_of(workspace / "tuned")
    steps = [line for line in lines if "loss" in line]
    output = capfd.readouterr().out
    sentence = (
        f"train.steps={len(steps)}: one pass over {len(steps)} rows of 64 tokens, 1 a step; "
        "train.eval_every="
    )
    assert sentence in output and "since a part is held out" in output
    assert any(line.get("eval_loss") is not None for line in steps)
    assert (
        main([*argv, "checkpoint.resume=must"]) == 0
        and sentence in capfd.readouterr().out
    )


@pytest.mark.usefixtures("workspace")
def test_profile_longer_than_the_counted_steps_is_refused() -> None:
    """Oracle: the sentence, which composing cannot know yet."""
    config = compose_config(
        [
            *MODEL,
            *DATA,
            "launch.device=cpu",
            "profile.enabled=true",
            "profile.skip_steps=900",
        ]
    )
    config.validate(2, "cpu")
    config.data.prepare(config.train.seq_len, config.model.vocab_size)
    with pytest.raises(ConfigError, match=r"need 904 steps, and train\.steps=\d+"):
        config.count_steps(2)
