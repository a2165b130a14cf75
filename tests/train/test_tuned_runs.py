"""Runs that train adapters: resumed, with every kind of optimizer step, and their final weights."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fsdptoys.cli.main import main
from fsdptoys.config.schema import Config
from fsdptoys.device import Device
from fsdptoys.errors import ConfigError
from fsdptoys.parallel import DDPConfig, FSDP1Config, FSDP2Config, SingleConfig
from fsdptoys.parallel.precision import DType
from fsdptoys.train.pretrained import TrainedModel
from fsdptoys.train.resume import check_same_run, run_facts
from fsdptoys.tune import Base, FullConfig, LoRAConfig
from tests.harness.folders import build, load, write
from tests.harness.nf4_models import GPT2, LLAMA
from tests.harness.ranks import run_ranks
from tests.harness.resumed_runs import (
    IN_BACKWARD,
    MUON,
    OVERLAPPED,
    Row,
    check_resumed_run,
    run_to_the_end,
    with_checkpoints,
)
from tests.harness.tiny import make_config

pytestmark = pytest.mark.usefixtures("without_pictures")

LORA = LoRAConfig(rank=4, dropout=0.2)
NF4 = dataclasses.replace(LORA, base=Base.nf4)


BFLOAT16 = FSDP2Config(param_dtype=DType.bfloat16)

ROWS = {
    "fsdp1": Row(FSDP1Config(), 2, {"async_save": True}),
    "fsdp2, muon": Row(FSDP2Config(), options=MUON),
    "ddp, quantized, gpt2": Row(DDPConfig(), options={"tune": NF4, "model": GPT2}),
}
MORE_ROWS = {
    "fsdp2, overlapped CPU offload, bf16": Row(
        BFLOAT16, options={"memory": OVERLAPPED}
    ),
    "ddp, muon": Row(DDPConfig(), options=MUON),
    "fsdp2, optimizer in the backward": Row(FSDP2Config(), options=IN_BACKWARD),
    "fsdp2, quantized, bf16": Row(BFLOAT16, options={"tune": NF4}),
}


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    "label",
    [*ROWS, *(pytest.param(label, marks=pytest.mark.extended) for label in MORE_ROWS)],
)
def test_resumed_runs_equal_uninterrupted_ones_bitwise(
    label: str, tmp_path: Path
) -> None:
    """Oracle: the uninterrupted run: its steps, and all parameters, frozen and quantized ones
    too."""
    row = (ROWS | MORE_ROWS)[label]
    options = {"tune": LORA, "model": LLAMA, **row.options}
    check_resumed_run(label, dataclasses.replace(row, options=options), tmp_path)


def logits_of_trained(
    configs: list[Config], folders: list[Path], tokens_BT: Tensor
) -> list[list[list[float]]]:
    """Logits of the model at the end of each run, and of what its run directory holds."""
    logits = []
    for config, folder in zip(configs, folders, strict=True):
        trainer = run_to_the_end(
            with_checkpoints(config, folder, every=0, final_weights=True)
        )
        trained = TrainedModel(str(folder)).load(Device("cpu"), torch.float32)
        with torch.no_grad():
            models = (trainer.strategy.model.eval(), trained)
            logits.append(
                [model(tokens_BT).float().flatten()[:500].tolist() for model in models]
            )
    return logits


@pytest.mark.usefixtures("unmeasured")
def test_final_weights_are_those_of_the_model_and_its_adapters(tmp_path: Path) -> None:
    """Oracle: the logits of the run's model; the folder ``adapter`` on the base, for an unquantized
    one."""
    base = tmp_path / "base"
    merged = tmp_path / "merged"
    write(base, build(LLAMA))
    started = dataclasses.replace(LLAMA, init_from=str(base))
    configs = [
        make_config(SingleConfig(), 1, tune=tune, model=model, steps=2)
        for tune, model in ((LORA, started), (NF4, started), (NF4, GPT2))
    ]
    folders = [tmp_path / name for name in ("plain", "nf4", "gpt2")]
    tokens_BT = torch.arange(24).view(1, 24)
    pairs = run_ranks(1, logits_of_trained, configs, folders, tokens_BT)[0]
    for trained, stored in pairs:
        assert stored == pytest.approx(trained, abs=1e-5)
    assert (
        main(
            [
                "convert",
                "to-hf",
                str(base),
                str(merged),
                f"adapter={folders[0]}/adapter",
            ]
        )
        == 0
    )
    with torch.no_grad():
        logits = load(merged)(tokens_BT).flatten()[:500].tolist()
    assert logits == pytest.approx(pairs[0][0], abs=1e-5)


@pytest.mark.parametrize(
    ("tune", "sentence"),
    [
        (
            FullConfig(),
            "tune=full is not lora, with which the checkpoint of step 1 was made; set tune=lora",
        ),
        (
            dataclasses.replace(LORA, rank=8),
            "tune.rank=8 is not 4, with which the checkpoint of step 1 was made",
        ),
        (
            NF4,
            (
                "tune.base=nf4 is not plain, with which the checkpoint of step 1 was made; set "
                "tune.base=plain"
            ),
        ),
    ],
    ids=["full", "rank", "base"],
)
def test_checkpoints_of_other_adapters_are_refused(tune: Any, sentence: str) -> None:
    """Oracle: the message."""
    saved = run_facts(make_config(SingleConfig(), 1, model=LLAMA, tune=LORA), 1) | {
        "step": 1
    }
    with pytest.raises(ConfigError, match=sentence):
        check_same_run(make_config(SingleConfig(), 1, model=LLAMA, tune=tune), saved)
