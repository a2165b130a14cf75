"""Adapters in PEFT's format: peft reads ours, we read theirs, and folders that do not fit a run are refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fsdptoys.checkpoint.adapter_folder import AdapterFolder, write_adapter
from fsdptoys.config.tune_checks import open_adapter
from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel
from fsdptoys.models.lora import Samples, add_adapters, is_adapter
from fsdptoys.tune import LoRAConfig
from tests.checkpoint.folders import build, load
from tests.models.families import SMALL
from tests.models.test_families import build_oracle
from tests.oracle import import_transformers

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]
THEIRS = {"gpt2": ["attn.c_attn", "attn.c_proj", "c_fc"], "qwen3_moe": TARGETS[:4]}
CASES = ["llama3 scaled tied", "qwen3", "gpt2", "qwen3_moe"]
RANK, ALPHA = 4, 6.0


def adapted(model: DecoderModel, targets: list[str] = TARGETS) -> DecoderModel:
    add_adapters(model, targets, RANK, ALPHA, 0.0, Samples(0))
    return model


def fill(model: DecoderModel, path: Path, targets: list[str]) -> AdapterFolder:
    """Read all adapters of a model from a folder."""
    folder = AdapterFolder(path)
    with torch.device("meta"):
        plain = model.config.build()
    folder.check(plain)
    folder.check_run("tune.adapter", RANK, ALPHA, targets, plain)
    for name, param in model.named_parameters():
        if is_adapter(name):
            folder.fill(param, name)
    return folder


def draw_adapters(model: DecoderModel) -> dict[str, Tensor]:
    torch.manual_seed(3)
    adapters = {name: param for name, param in model.named_parameters() if is_adapter(name)}
    for param in adapters.values():
        nn.init.normal_(param, 0.0, 0.2)
    return {name: param.detach() for name, param in adapters.items()}


def write_own(path: Path, model: DecoderModel, adapters: dict[str, Tensor]) -> None:
    write_adapter(path, adapters, model.config, rank=RANK, alpha=ALPHA, dropout=0.0)


def our_targets(case: str) -> list[str]:
    return TARGETS if case != "qwen3_moe" else TARGETS[:4]


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_adapters_of_peft_compute_and_learn_the_same(case: str, tmp_path: Path) -> None:
    """Oracle: peft's model: logits; gradients, and adapters after a step of AdamW, to 1e-5 of each one's norm.

    GPT-2's queries, keys and values share one A there, whose gradient is the sum of ours.
    """
    import_transformers()
    peft = pytest.importorskip("peft")
    base = build_oracle(SMALL[case])
    base.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=THEIRS.get(case, TARGETS), init_lora_weights=False
    )
    oracle = peft.get_peft_model(base, settings)
    oracle.save_pretrained(tmp_path / "theirs")
    model = adapted(load(tmp_path / "base"), our_targets(case))
    folder = fill(model, tmp_path / "theirs", our_targets(case))

    tokens_BT = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    logits_BTV, oracle_logits_BTV = model(tokens_BT), oracle(input_ids=tokens_BT, use_cache=False).logits
    torch.testing.assert_close(logits_BTV, oracle_logits_BTV, rtol=1e-5, atol=1e-5)
    for each in (logits_BTV, oracle_logits_BTV):
        F.cross_entropy(each.flatten(0, 1), tokens_BT.flatten()).backward()

    def compare(read: str) -> None:
        """Convert their values to our names through a folder, like the adapters."""
        oracle.save_pretrained(tmp_path / read)
        expected = adapted(model.config.build(), our_targets(case))
        fill(expected, tmp_path / read, our_targets(case))
        ours, sums = dict(model.named_parameters()), dict[str, Tensor]()
        for name, other in expected.named_parameters():
            if not is_adapter(name):
                continue
            found = ours[name].grad if read == "gradients" else ours[name].detach()
            assert found is not None
            if ".lora_a." in name and any(each in name for each in ("q_proj", "k_proj", "v_proj")) and case == "gpt2":
                key = name.rpartition(".attn.")[0]
                sums[key] = sums.get(key, torch.zeros_like(found)) + found
                if "v_proj" in name and read == "gradients":
                    assert (sums[key] - other).norm() <= 1e-5 * other.norm(), name
            else:
                assert (found - other).norm() <= 1e-5 * other.norm(), name

    theirs = [param for param in oracle.parameters() if param.requires_grad]
    kept = [param.detach().clone() for param in theirs]
    with torch.no_grad():
        for param in theirs:
            param.copy_(param.grad)
        compare("gradients")
        for param, value in zip(theirs, kept, strict=True):
            param.copy_(value)
    for params in ([p for p in model.parameters() if p.requires_grad], theirs):
        # A large epsilon: where a gradient is rounding noise, AdamW would make it a step of full size.
        torch.optim.AdamW(params, lr=1e-2, eps=1e-3, weight_decay=0.1).step()
    compare("stepped")
    assert folder.targets == sorted(our_targets(case))


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_peft_loads_our_adapters(case: str, tmp_path: Path) -> None:
    """Oracle: peft's PeftModel.from_pretrained on a folder of ours: logits to 1e-5; other modules get no adapter."""
    import_transformers()
    peft = pytest.importorskip("peft")
    base = build_oracle(SMALL[case])
    base.save_pretrained(tmp_path / "base")
    model = adapted(load(tmp_path / "base"), our_targets(case))
    adapters = draw_adapters(model)
    write_own(tmp_path / "ours", model, adapters)
    oracle = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    stored = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert sum(".lora_A." in name for name, _ in oracle.named_parameters()) * 2 == len(stored)
    tokens_BT = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    expected_BTV = oracle(input_ids=tokens_BT, use_cache=False).logits
    torch.testing.assert_close(model(tokens_BT), expected_BTV, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [*CASES, "llama4"])
def test_our_adapters_round_trip_bitwise(case: str, tmp_path: Path) -> None:
    """Oracle: the adapters before writing; merged into weights, the sum W + scale · B A."""
    model = adapted(build(SMALL[case]), our_targets(case))
    adapters = draw_adapters(model)
    write_own(tmp_path / "ours", model, adapters)
    again = adapted(build(SMALL[case]), our_targets(case))
    folder = fill(again, tmp_path / "ours", our_targets(case))
    for name, param in again.named_parameters():
        if is_adapter(name):
            assert torch.equal(param, adapters[name]), name
            if name.endswith("lora_b.weight"):
                layer = name.removesuffix(".lora_b.weight")
                weight = model.get_parameter(f"{layer}.weight").detach()
                found, product = weight.clone(), param @ again.get_parameter(f"{layer}.lora_a.weight")
                folder.merge(found, f"{layer}.weight")
                torch.testing.assert_close(found, weight + ALPHA / RANK * product.detach())


CONFIG = SMALL["qwen3"]
FITTING = {"rank": RANK, "alpha": ALPHA, "targets": TARGETS}
EDITS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rank": ({}, {"rank": 8}, "tune.rank=8 is not 4, the rank of tune.adapter={}; set tune.rank=4"),
    "alpha": ({}, {"alpha": 8.0}, "tune.alpha=8 is not 6, that of tune.adapter={}; set tune.alpha=6"),
    "rslora": (
        {"use_rslora": True},
        {},
        "tune.alpha=6 is not 12, that of tune.adapter={}; set tune.alpha=12",
    ),
    "targets": (
        {},
        {"targets": ["q_proj", "v_proj"]},
        "tune.targets=[q_proj,v_proj] is not [k_proj,o_proj,q_proj,up_proj,v_proj], the layers of tune.adapter={}; "
        "set tune.targets=[k_proj,o_proj,q_proj,up_proj,v_proj]",
    ),
    "dora": (
        {"use_dora": True},
        {},
        "tune.adapter={}/adapter_config.json says use_dora=true, and only false is read here; use an adapter trained "
        "with it",
    ),
    "another method": (
        {"peft_type": "IA3"},
        {},
        "tune.adapter={}/adapter_config.json says peft_type='IA3', and only 'LORA' is read here; use an adapter "
        "trained with it",
    ),
    "changed base": (
        {"init_lora_weights": "pissa"},
        {},
        "tune.adapter={}/adapter_config.json says init_lora_weights='pissa', and only true is read here; use an "
        "adapter trained with it",
    ),
    "rank of the tensors": (
        {"r": 8},
        {},
        "tune.adapter={}/adapter_config.json says r=8 for model.layers.0.self_attn.q_proj, whose tensors have 4; "
        "download or write the folder again",
    ),
    "several scales": (
        {"alpha_pattern": {"q_proj": 12}},
        {},
        "tune.adapter={} multiplies layers by 1.5 and by 3, and a run has one tune.alpha / tune.rank; use an adapter "
        "without alpha_pattern",
    ),
    "expression": (
        {"rank_pattern": {"(a+)+": 12}},
        {},
        "tune.adapter={}/adapter_config.json names layers by the expression (a+)+ in rank_pattern, and only names are "
        "read here; write the names in its place",
    ),
    "no number": (
        {"lora_alpha": "x"},
        {},
        "tune.adapter={}/adapter_config.json says lora_alpha='x', which is no number above 0; download or write the "
        "folder again",
    ),
    "base": (
        {"base_model_name_or_path": "meta/llama"},
        {},
        "tune.adapter={} was trained on 'meta/llama', and model.init_from=null draws other weights; set "
        "model.init_from to a folder with that model",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = adapted(build(CONFIG))
    write_own(tmp_path / "folder", model, draw_adapters(model))
    (tmp_path / "folder" / "checksums.json").unlink()
    return tmp_path / "folder"


def refusal(folder: Path, **settings: Any) -> str:
    with torch.device("meta"):
        model = CONFIG.build()
    with pytest.raises(ConfigError) as refused:
        open_adapter(LoRAConfig(**FITTING | settings, adapter=str(folder)), model)
    return str(refused.value).replace(str(folder), "{}")


@pytest.mark.parametrize("case", EDITS)
def test_adapters_of_another_run_are_refused(case: str, folder: Path) -> None:
    """Oracle: the expected message."""
    edits, settings, sentence = EDITS[case]
    tree = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(tree | edits))
    assert refusal(folder, **settings) == sentence


def test_tensors_that_do_not_fit_are_refused(folder: Path) -> None:
    """Oracle: the expected messages: a missing block, another width, a tensor of something else, a pickle."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for changed, sentence in (
        (
            {name: each for name, each in tensors.items() if ".layers.1." not in name},
            "tune.adapter={} holds no adapter of layers.1.attn.q_proj; use one of all blocks",
        ),
        (tensors | {first: torch.zeros(4, 32)}, f"holds {first} in the shape 4×32, and the adapter of a qwen3 model"),
        (
            tensors | {"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64)},
            "holds base_model.model.lm_head.lora_A.weight, for which the adapter of a qwen3 model as configured has "
            "no place",
        ),
    ):
        save_file(changed, file)
        assert sentence in refusal(folder)
    file.rename(folder / "adapter_model.bin")
    assert "adapter_model.bin alone, which can run code" in refusal(folder)
    (folder / "adapter_config.json").unlink()
    assert refusal(folder).startswith("tune.adapter={} holds no adapter_config.json; name a folder in PEFT's format")


def test_dataclass_and_folder_agree_on_a_fitting_run(folder: Path) -> None:
    """Oracle: no refusal; the default of no adapter opens nothing."""
    with torch.device("meta"):
        model = CONFIG.build()
    fitting = LoRAConfig(**FITTING, adapter=str(folder))
    assert open_adapter(fitting, model) is not None
    assert open_adapter(dataclasses.replace(fitting, adapter=None), model) is None
