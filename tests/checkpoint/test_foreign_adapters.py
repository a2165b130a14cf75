"""Adapters of transformers models: against peft, under FSDP2, and in peft's own format."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from fsdptoys.checkpoint import HuggingFaceFolder
from fsdptoys.checkpoint.adapter_export import ADAPTER_FOLDER
from fsdptoys.checkpoint.adapter_folder import AdapterFolder
from fsdptoys.device import Device
from fsdptoys.errors import ConfigError
from fsdptoys.loss.objective import IGNORE_INDEX
from fsdptoys.models import TransformersConfig
from fsdptoys.models.lora import linear_layers
from fsdptoys.optim.config import set_schedule
from fsdptoys.parallel import FSDP2Config, ParallelConfig, SingleConfig
from fsdptoys.train.final_weights import save_final_weights
from fsdptoys.train.pretrained import TrainedModel
from fsdptoys.train.trainer import Trainer
from fsdptoys.tune import Base, LoRAConfig
from tests.harness.foreign_folders import write_original
from tests.harness.foreign_runs import foreign_config
from tests.harness.ranks import run_ranks
from tests.harness.run_tables import extended
from tests.harness.transformers_oracle import import_transformers

RANK = 4
ALPHA = 8.0
TARGETS = {
    "llama": ["q_proj", "down_proj"],
    "gpt2": ["c_attn", "mlp.c_proj"],
    "qwen3_moe": ["q_proj", "o_proj"],
    "deepseek_v3": [r"layers\.\d+\.self_attn\.(q_b|kv_b)_proj", "o_proj"],
    "gpt_oss": ["v_proj"],
    "gemma3_text": ["gate_proj"],
    "mixtral": ["k_proj"],
    "phi3": ["qkv_proj", "gate_up_proj"],
}
THEIRS = {"deepseek_v3": ["q_b_proj", "kv_b_proj", "o_proj"]}
"""peft's names of the same layers."""
NO_DROPOUT = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
SHORT = ("llama", "gpt2", "deepseek_v3")
ROWS = [name if name in SHORT else extended(name) for name in TARGETS]


def lora(family: str, **settings: Any) -> LoRAConfig:
    return LoRAConfig(
        rank=RANK, alpha=ALPHA, targets=TARGETS[family], dropout=0.0, **settings
    )


def foreign(folder: Path) -> TransformersConfig:
    config = HuggingFaceFolder(folder).model_config("transformers")
    assert isinstance(config, TransformersConfig)
    return dataclasses.replace(config, init_from=str(folder))


def run_config(family: str, folder: Path, parallel: ParallelConfig, ranks: int) -> Any:
    return foreign_config(foreign(folder), parallel, ranks, tune=lora(family))


def train(config: Any, run: Path | None) -> tuple[list[float], list[float]]:
    """Losses and norms of a run, which saves its adapters into a folder."""
    trainer = Trainer(config)
    if run is not None:
        run.mkdir(exist_ok=True)
        save_final_weights(config, trainer.strategy, run / "start")
    trainer.train()
    if run is not None:
        save_final_weights(config, trainer.strategy, run / "end")
    return (
        [step.loss for step in trainer.history],
        [step.grad_norm for step in trainer.history],
    )


def train_with_peft(
    base: Any, adapter: Path, config: Any
) -> tuple[list[float], list[float]]:
    """The same steps of peft's model, in one process."""
    peft = pytest.importorskip("peft")
    model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True).train()
    params = [param for param in model.parameters() if param.requires_grad]
    trainer = Trainer(config)
    group = trainer.optimizer.param_groups[0]
    optimizer = torch.optim.AdamW(
        params,
        lr=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
    )
    losses = []
    norms = []
    for step in range(1, config.train.steps + 1):
        optimizer.param_groups[0]["lr"] = group["lr"]
        batches = trainer.data.next_step(lambda seconds: seconds).microbatches
        valid = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in batches)
        total = 0.0
        for tokens, labels in batches:
            logits = model(input_ids=tokens, use_cache=False).logits
            loss = F.cross_entropy(
                logits.float().flatten(0, 1),
                labels.flatten(),
                ignore_index=IGNORE_INDEX,
                reduction="sum",
            )
            (loss / valid).backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(params, 1.0).item())
        losses.append(total / valid)
        optimizer.step()
        optimizer.zero_grad()
        set_schedule(trainer.schedule, step)
    return losses, norms


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.oracle
@pytest.mark.parametrize("family", ROWS)
def test_adapters_train_as_those_of_peft_in_one_process_and_under_fsdp2(
    family: str, tmp_path: Path
) -> None:
    """Oracle: peft's model, which starts from the adapters that ours started with: losses and norms
    to 1e-5; its logits with our trained adapters are those of our merged weights."""
    transformers = import_transformers()
    peft = pytest.importorskip("peft")
    folder = tmp_path / "folder"
    write_original(folder, family, **NO_DROPOUT.get(family, {}))
    one = run_config(family, folder, SingleConfig(simulated_ranks=2), 1)
    two = run_config(family, folder, FSDP2Config(), 2)
    alone = run_ranks(1, train, one, None)[0]
    spread = run_ranks(2, train, two, tmp_path / "run")[0]

    def base() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder)

    start = tmp_path / "run" / "start" / ADAPTER_FOLDER
    end = tmp_path / "run" / "end" / ADAPTER_FOLDER
    settings = json.loads((start / "adapter_config.json").read_text())
    chosen = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=THEIRS.get(family, TARGETS[family]),
    )
    fresh = peft.get_peft_model(base(), chosen)
    assert settings["target_modules"] == sorted(fresh.targeted_module_names)
    expected = run_ranks(1, train_with_peft, base(), start, one)[0]
    for result in (alone, spread):
        for values, others in zip(result, expected, strict=True):
            assert values == pytest.approx(others, rel=1e-5)

    weights = load_file(tmp_path / "run" / "end" / "weights" / "weights.safetensors")
    merged = peft.PeftModel.from_pretrained(base(), end).merge_and_unload()
    with torch.device("meta"):
        names = foreign(folder).build().hugging_face_names
    moved = 0
    plain = dict(base().named_parameters())
    for name, param in merged.named_parameters():
        own = next(key for key, other in names.items() if other == name)
        torch.testing.assert_close(weights[own], param.detach(), rtol=1e-5, atol=1e-6)
        moved += not torch.equal(weights[own], plain[name])
    assert moved == len(settings["target_modules"])


@pytest.mark.oracle
def test_adapters_of_peft_continue_in_a_run(tmp_path: Path) -> None:
    """Oracle: peft's own adapters, drawn at random; a run starts with their weights."""
    peft = pytest.importorskip("peft")
    original = write_original(tmp_path / "folder", "gpt2")
    settings = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=TARGETS["gpt2"],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(original, settings)
    model.save_pretrained(tmp_path / "theirs")
    state = {
        name.removeprefix("base_model.model.").replace(".default", ""): tensor
        for name, tensor in model.state_dict().items()
        if "lora_" in name
    }
    tune = lora("gpt2", adapter=str(tmp_path / "theirs"))
    config = foreign_config(foreign(tmp_path / "folder"), FSDP2Config(), 2, tune=tune)
    adapters = run_ranks(2, adapters_of, config)[0]
    assert len(adapters) == len(state)
    for name, tensor in adapters.items():
        their_name = name.replace("layers.", "transformer.h.")
        their_name = their_name.replace("lora_a", "lora_A").replace("lora_b", "lora_B")
        assert torch.equal(torch.from_numpy(tensor), state[their_name]), name


@pytest.mark.oracle
def test_generation_adds_the_adapters_of_peft_to_a_folder(tmp_path: Path) -> None:
    """Oracle: the logits of peft's model with adapters drawn at random, to 1e-5."""
    peft = pytest.importorskip("peft")
    original = write_original(tmp_path / "folder", "mixtral")
    settings = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=["k_proj", "o_proj"],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(original, settings).eval()
    model.save_pretrained(tmp_path / "theirs")
    trained = TrainedModel(str(tmp_path / "folder"), adapter=str(tmp_path / "theirs"))
    own = trained.load(Device("cpu"), torch.float32)
    tokens_BT = torch.arange(20).view(1, 20) + 3
    with torch.no_grad():
        expected = model(input_ids=tokens_BT, use_cache=False).logits
        torch.testing.assert_close(own(tokens_BT), expected, rtol=1e-5, atol=1e-5)


def adapters_of(config: Any) -> dict[str, Any]:
    params = Trainer(config).strategy.full_parameters()
    return {name: param.clone().numpy() for name, param in params if ".lora_" in name}


def refusal(config: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        config()
    return str(refused.value)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("family", "targets", "sentence"),
    [
        ("qwen3_moe", ["gate"], "layers.0.mlp.gate belongs to the routed experts"),
        ("qwen3_moe", ["experts"], "layers.0.mlp.experts belongs to the routed"),
        ("deepseek_v3", ["down_proj"], "peft takes adapters of layers.0.mlp.down_proj"),
        ("gpt2", ["q_proj"], "set tune.targets=[c_attn,c_fc,c_proj]"),
        ("llama", ["q_proj("], "neither the name of a layer nor a regular expression"),
        ("llama", ["lm_head"], "is no linear layer of the blocks of a transformers"),
    ],
)
def test_layers_that_get_no_adapters_are_refused_by_name(
    family: str, targets: list[str], sentence: str, tmp_path: Path
) -> None:
    """Oracle: the sentence."""
    import_transformers()
    write_original(tmp_path, family)
    model = foreign(tmp_path)
    tune = LoRAConfig(rank=RANK, targets=targets)
    sentence_of_refusal = refusal(
        lambda: foreign_config(model, SingleConfig(), 1, tune=tune)
    )
    assert (
        sentence_of_refusal.startswith("tune.targets names ")
        and sentence in sentence_of_refusal
    )


@pytest.mark.oracle
def test_quantized_weights_are_refused_by_name(tmp_path: Path) -> None:
    """Oracle: the sentence."""
    write_original(tmp_path, "llama")
    model = foreign(tmp_path)
    tune = LoRAConfig(rank=RANK, targets=["q_proj"], base=Base.nf4)
    sentence_of_refusal = refusal(
        lambda: foreign_config(model, SingleConfig(), 1, tune=tune)
    )
    assert sentence_of_refusal.startswith("tune.base=nf4 is not built for")


@pytest.mark.oracle
def test_an_adapter_of_other_layers_is_refused(tmp_path: Path) -> None:
    """Oracle: the sentence, for a target that names fewer layers than the folder has."""
    peft = pytest.importorskip("peft")
    original = write_original(tmp_path / "folder", "gpt2")
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["c_proj"])
    peft.get_peft_model(original, settings).save_pretrained(tmp_path / "theirs")
    with torch.device("meta"):
        model = foreign(tmp_path / "folder").build()
    folder = AdapterFolder(tmp_path / "theirs")
    folder.check(model)
    with pytest.raises(
        ConfigError, match=r"holds an adapter of layers\.0\.attn\.c_proj, which"
    ):
        folder.check_run("tune.adapter", RANK, ALPHA, ["mlp.c_proj"], model)
    assert len(linear_layers(model)) == 8
