"""Adapters in PEFT's format: peft reads ours, we read theirs, and folders that do not fit a run are
refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from fsdptoys.checkpoint.adapter_folder import AdapterFolder
from fsdptoys.config.rules.tune import open_adapter
from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel
from fsdptoys.models.lora import is_adapter
from fsdptoys.tune import LoRAConfig
from tests.checkpoint.damages import SENTENCES, edit_json, edit_tensors
from tests.harness.adapters import (
    ALPHA,
    RANK,
    TARGETS,
    adapted,
    draw_adapters,
    write_own,
)
from tests.harness.families import SMALL
from tests.harness.folders import build, load
from tests.harness.transformers_oracle import build_oracle, import_transformers

OURS = dict.fromkeys(["llama3 scaled tied", "qwen3", "gpt2", "llama4"], TARGETS) | {
    "qwen3_moe": TARGETS[:4]
}
THEIRS = {"gpt2": ["attn.c_attn", "attn.c_proj", "c_fc"], "qwen3_moe": TARGETS[:4]}
CASES = ["llama3 scaled tied", "qwen3", "gpt2", "qwen3_moe"]
TOKENS_BT = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))


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


def with_peft(case: str, folder: Path) -> tuple[Any, Any, DecoderModel]:
    """The library peft, transformers' model, and ours with the same weights and adapters."""
    import_transformers()
    peft = pytest.importorskip("peft")
    base = build_oracle(SMALL[case])
    base.save_pretrained(folder / "base")
    return peft, base, adapted(load(folder / "base"), OURS[case])


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_adapters_of_peft_compute_and_learn_the_same(case: str, tmp_path: Path) -> None:
    """Oracle: peft's model: logits; gradients, and adapters after a step of AdamW, to 1e-5 of each
    one's norm.

    GPT-2's queries, keys and values share one A there; its gradient is the sum of ours.
    """
    peft, base, model = with_peft(case, tmp_path)
    settings = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=THEIRS.get(case, TARGETS),
        init_lora_weights=False,
    )
    oracle = peft.get_peft_model(base, settings)
    oracle.save_pretrained(tmp_path / "theirs")
    folder = fill(model, tmp_path / "theirs", OURS[case])
    logits_BTV = model(TOKENS_BT)
    oracle_logits_BTV = oracle(input_ids=TOKENS_BT, use_cache=False).logits
    torch.testing.assert_close(logits_BTV, oracle_logits_BTV, rtol=1e-5, atol=1e-5)
    for output_BTV in (logits_BTV, oracle_logits_BTV):
        F.cross_entropy(output_BTV.flatten(0, 1), TOKENS_BT.flatten()).backward()

    def compare(read: str) -> None:
        """Convert their values to our names through a folder, like the adapters."""
        oracle.save_pretrained(tmp_path / read)
        expected = adapted(model.config.build(), OURS[case])
        fill(expected, tmp_path / read, OURS[case])
        params = dict(model.named_parameters())
        sums = dict[str, Tensor]()
        for name, other in expected.named_parameters():
            if not is_adapter(name):
                continue
            value = params[name].grad if read == "gradients" else params[name].detach()
            assert value is not None
            if (
                ".lora_a." in name
                and any(part in name for part in ("q_proj", "k_proj", "v_proj"))
                and case == "gpt2"
            ):
                key = name.rpartition(".attn.")[0]
                sums[key] = sums.get(key, torch.zeros_like(value)) + value
                if "v_proj" in name and read == "gradients":
                    assert (sums[key] - other).norm() <= 1e-5 * other.norm(), name
            else:
                assert (value - other).norm() <= 1e-5 * other.norm(), name

    oracle_params = [param for param in oracle.parameters() if param.requires_grad]
    copies = [param.detach().clone() for param in oracle_params]
    with torch.no_grad():
        for param in oracle_params:
            param.copy_(param.grad)
        compare("gradients")
        for param, value in zip(oracle_params, copies, strict=True):
            param.copy_(value)
    for params in ([p for p in model.parameters() if p.requires_grad], oracle_params):
        # A large epsilon: where a gradient is rounding noise, AdamW would make it a step of full
        # size.
        torch.optim.AdamW(params, lr=1e-2, eps=1e-3, weight_decay=0.1).step()
    compare("stepped")
    assert folder.targets == sorted(OURS[case])


@pytest.mark.oracle
def test_patterns_mean_the_layers_that_peft_gives_them(tmp_path: Path) -> None:
    """Oracle: the scales of peft's layers; in its patterns a dot is any character."""
    peft, base, model = with_peft("qwen3", tmp_path)
    patterns = {
        "layers.0.self_attn.q.proj": 3,
        "layers.1.mlp.down_proj": 5,
        "k_proj": 7,
        "proj": 9,
    }
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, alpha_pattern=patterns
    )
    oracle = peft.get_peft_model(base, settings)
    oracle.save_pretrained(tmp_path / "theirs")
    folder = AdapterFolder(tmp_path / "theirs")
    folder.check(model)
    layers = {
        name: getattr(module, "scaling", None)
        for name, module in oracle.named_modules()
    }
    expected = {
        name: scaling["default"]
        for name, scaling in layers.items()
        if isinstance(scaling, dict)
    }
    scales = {
        folder._locations[layer].module: scale for layer, scale in folder.scales.items()
    }
    assert scales == expected and len(set(scales.values())) == 3


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_peft_loads_our_adapters(case: str, tmp_path: Path) -> None:
    """Oracle: peft's PeftModel.from_pretrained on a folder of ours: logits to 1e-5; other modules
    get no adapter."""
    peft, base, model = with_peft(case, tmp_path)
    adapters = draw_adapters(model)
    write_own(tmp_path / "ours", model, adapters)
    oracle = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    stored = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert sum(".lora_A." in name for name, _ in oracle.named_parameters()) * 2 == len(
        stored
    )
    expected_BTV = oracle(input_ids=TOKENS_BT, use_cache=False).logits
    torch.testing.assert_close(model(TOKENS_BT), expected_BTV, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [*CASES, "llama4"])
def test_our_adapters_round_trip_bitwise(case: str, tmp_path: Path) -> None:
    """Oracle: the adapters before writing; merged into weights, the sum W + scale · B A."""
    model = adapted(build(SMALL[case]), OURS[case])
    adapters = draw_adapters(model)
    write_own(tmp_path / "ours", model, adapters)
    again = adapted(build(SMALL[case]), OURS[case])
    folder = fill(again, tmp_path / "ours", OURS[case])
    for name, param in again.named_parameters():
        if is_adapter(name):
            assert torch.equal(param, adapters[name]), name
            if name.endswith("lora_b.weight"):
                layer = name.removesuffix(".lora_b.weight")
                weight = model.get_parameter(f"{layer}.weight").detach()
                merged = weight.clone()
                product = param @ again.get_parameter(f"{layer}.lora_a.weight")
                folder.merge(merged, f"{layer}.weight")
                torch.testing.assert_close(
                    merged, weight + ALPHA / RANK * product.detach()
                )


CONFIG = SMALL["qwen3"]
FITTING = {"rank": RANK, "alpha": ALPHA, "targets": TARGETS}


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


@pytest.mark.parametrize("row", SENTENCES["settings other than the adapter's"], ids=str)
def test_settings_that_differ_from_the_adapter_are_refused(
    row: dict[str, Any], folder: Path
) -> None:
    """Oracle: the expected message."""
    assert refusal(folder, **row["settings"]) == row["says"]


@pytest.mark.parametrize("row", SENTENCES["configurations of adapters"], ids=str)
def test_adapters_of_other_methods_are_refused(
    row: dict[str, Any], folder: Path
) -> None:
    """Oracle: the expected message."""
    edit_json("adapter_config.json", **row["keys"])(folder)
    assert refusal(folder) == row["says"]


QUERIES = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
HEAD = "base_model.model.lm_head.lora_A.weight"


def without_second_block(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            without_second_block,
            "tune.adapter={} holds no adapter of layers.1.attn.q_proj; use one of all blocks",
        ),
        (
            lambda tensors: tensors.update({QUERIES: torch.zeros(4, 32)}),
            f"holds {QUERIES} in the shape 4×32, and the adapter of a qwen3 model",
        ),
        (
            lambda tensors: tensors.update({HEAD: torch.zeros(4, 64)}),
            f"holds {HEAD}, for which the adapter of a qwen3 model as configured has no place",
        ),
    ],
    ids=["missing block", "width", "unknown"],
)
def test_tensors_that_do_not_fit_are_refused(
    change: Any, sentence: str, folder: Path
) -> None:
    """Oracle: the expected message."""
    edit_tensors(change, "adapter_model.safetensors")(folder)
    assert sentence in refusal(folder)


def test_non_finite_adapters_are_refused_before_training_and_by_every_reader(
    folder: Path,
) -> None:
    """Oracle: the expected message, of the launcher's check and of the tensor's reader."""
    edit_tensors(
        lambda tensors: tensors[QUERIES][0, 0].fill_(torch.nan),
        "adapter_model.safetensors",
    )(folder)
    source = AdapterFolder(folder)
    says = f"holds {QUERIES} with values that are not finite; use other weights"
    with pytest.raises(ConfigError, match=says):
        source.check_values()
    with torch.device("meta"):
        model = SMALL["qwen3"].build()
    source.check(model)
    with pytest.raises(ConfigError, match=says):
        for name, param in model.named_parameters():
            source.merge(torch.zeros(param.shape), name)


def test_incomplete_folders_are_refused(folder: Path) -> None:
    """Oracle: the expected messages, for a pickle in place of tensors and for a missing
    configuration."""
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert "adapter_model.bin alone, which can run code" in refusal(folder)
    (folder / "adapter_config.json").unlink()
    assert refusal(folder).startswith(
        "tune.adapter={} holds no adapter_config.json; name a folder in PEFT's format"
    )
