"""Checkpoints of torchtitan, read and written."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

from fsdptoys.checkpoint import differences
from fsdptoys.cli.convert import convert_command
from fsdptoys.models import Qwen3Config, RotaryConfig
from tests.checkpoint.titan_folders import (
    LLAMA,
    MOE,
    QWEN3,
    SIZES,
    TIED,
    overrides_of,
    refusal,
    save_alone,
    titan_state,
)
from tests.harness.folders import load
from tests.harness.ranks import run_ranks
from tests.harness.saved_runs import save_run
from tests.harness.titan import Titan

CASES: dict[str, tuple[RotaryConfig, str, bool]] = {
    "llama": (LLAMA, "0.2", False),
    "llama 0.5": (LLAMA, "0.5", False),
    "llama fused": (LLAMA, "0.5", True),
    "qwen3": (QWEN3, "0.2", False),
    "qwen3 tied": (TIED, "0.5", False),
    "qwen3_moe": (MOE, "0.2", False),
}
"""Case → our configuration, version of torchtitan's names, and whether projections are fused."""
TOKENS_BT = torch.arange(2 * 33).view(2, 33) % 97


def shard(model: Titan) -> None:
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)


def save_titan(folder: Path, config: RotaryConfig, version: str, fused: bool) -> Any:
    """Save a sharded model with the state of its optimizer, as torchtitan does; its logits."""
    model = Titan(config, version, fused)
    model.draw()
    logits = model(TOKENS_BT).detach()
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(TOKENS_BT).sum().backward()
    optimizer.step()
    state = {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "train_state": {"step": torch.tensor(3)},
    }
    dcp.save(state, checkpoint_id=folder)
    return logits.numpy()


def load_titan(folder: Path, config: RotaryConfig, version: str) -> Any:
    """Load a folder into a sharded model; its logits."""
    model = Titan(config, version)
    nn.init.zeros_(model.norm.weight)
    shard(model)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)
    return model(TOKENS_BT).detach().numpy()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.extended] if case == "llama 0.5" else [])
        for case in CASES
    ],
)
def test_checkpoints_of_torchtitan_keep_their_function(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the logits of torchtitan's arithmetic on two ranks that saved with FSDP2, to 1e-5."""
    config, version, fused = CASES[case]
    arguments = tmp_path / "step-3", config, version, fused
    logits = run_ranks(2, save_titan, *arguments)[0]
    paths = [str(tmp_path / "step-3"), str(tmp_path / "hf")]
    assert convert_command(["from-dcp", *paths, *overrides_of(config)]) == 0
    model = load(tmp_path / "hf")
    assert not differences(config, model.config)
    torch.testing.assert_close(
        model(TOKENS_BT), torch.from_numpy(logits), rtol=1e-5, atol=1e-5
    )
    assert f"model.init_from={tmp_path}/hf" in capsys.readouterr().out


@pytest.mark.parametrize("case", ["llama", "qwen3 tied", "qwen3_moe"])
def test_torchtitan_loads_what_is_written(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: our logits; two ranks load the folder into an FSDP2 model of torchtitan's names."""
    config, version, _ = CASES[case]
    save_run(tmp_path / "run", config)
    paths = [str(tmp_path / "run"), str(tmp_path / "dcp")]
    assert convert_command(["to-dcp", *paths, f"names={version}"]) == 0
    assert f"under the names of torchtitan {version}" in capsys.readouterr().out
    logits = run_ranks(2, load_titan, tmp_path / "dcp", config, version)[0]
    assert convert_command(["to-hf", paths[0], str(tmp_path / "hf")]) == 0
    expected = load(tmp_path / "hf")(TOKENS_BT)
    torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-5, atol=1e-5)
    # and back
    back = ["from-dcp", paths[1], str(tmp_path / "back"), *overrides_of(config)]
    assert convert_command(back) == 0
    files = [
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "back")
    ]
    assert files[0] == files[1]


def test_presets_are_found_by_their_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the preset; a model of other shapes is described in the message."""
    sizes = {**SIZES, "ffn_dim": 176, "vocab_size": 256}
    preset = Qwen3Config(**sizes, head_dim=32)
    folder = save_alone(tmp_path / "preset", titan_state(preset))
    assert convert_command(["from-dcp", str(folder), str(tmp_path / "hf")]) == 0
    assert (
        "of model=qwen3_debug: rotary base 1e+06, not scaled" in capsys.readouterr().out
    )
    assert load(tmp_path / "hf").config.family == "qwen3"
    other = save_alone(tmp_path / "other", titan_state(LLAMA))
    assert refusal(other) == (
        "{} has the shapes of no preset; write the model after the folders, as model=llama_debug "
        "model.n_layers=2 model.vocab_size=97 model.dim=64 model.ffn_dim=112 model.n_heads=N "
        "model.n_kv_heads=N"
    )
    nothing = save_alone(tmp_path / "nothing", {"weight": torch.ones(2)})
    assert "holds weight, and no tok_embeddings.weight" in refusal(nothing)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["model.dim=64"],
            "changes a preset that is not named; write fsdptoys convert from-dcp",
        ),
        (["names=0.2"], "names=0.2 is not a setting of fsdptoys convert from-dcp"),
        (["dtype=int8"], "dtype=int8 must be one of float32, bfloat16, float16"),
        (["dtype=float32", "dtype=float16"], "dtype= is written twice"),
        (
            ["model=gpt2_debug"],
            "family gpt2, and torchtitan's names are known for llama, qwen3,",
        ),
        (
            ["model=llama_debug", "model.mlp_bias=true"],
            "model.mlp_bias=true has no counterpart",
        ),
        (
            ["model=llama3_1b"],
            "in the shape 97×64, and a llama model as configured needs",
        ),
    ],
    ids=str,
)
def test_mistakes_of_the_command_are_refused(
    options: list[str], message: str, tmp_path: Path
) -> None:
    """Oracle: the message."""
    folder = save_alone(tmp_path / "step-3", titan_state(LLAMA))
    assert message in refusal(folder, *options)


def test_what_would_change_the_function_is_refused(tmp_path: Path) -> None:
    """Oracle: the message, for a bias of a router and a head that is tied only by name."""
    state = titan_state(MOE)
    state["layers.0.moe.expert_bias"][1] = 0.5
    folder = save_alone(tmp_path / "moe", state)
    assert "expert_bias, which changes the choice" in refusal(
        folder, *overrides_of(MOE)
    )
    state = titan_state(QWEN3, "0.5")
    folder = save_alone(tmp_path / "head", state)
    assert "set model.tie_embeddings=false" in refusal(folder, *overrides_of(TIED))
