"""Wrap policies by class and by size: which modules become units."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from fsdptoys.config.compose import compose_config
from fsdptoys.errors import ConfigError
from fsdptoys.models import DecoderModel
from fsdptoys.parallel import FSDP1Config, FSDP2Config, FSDPConfig
from fsdptoys.parallel.wrap import inside_out
from fsdptoys.plan.search.combinations import EVERYTHING, Combinations
from fsdptoys.plan.search.switches import overrides_between, validate_switches, vary
from tests.harness.ranks import run_ranks
from tests.harness.tiny import FAMILIES, tiny_model

CLASSES = [
    ["Block"],
    ["Attention", "Embedding"],
    ["LMHead", "Linear"],
    ["MoE", "RMSNorm", "LayerNorm"],
]
SIZES = [1.0, 40.0, 361.0, 1800, 2411.0, 5000.0, 1e5]


def build_model(name: str, device: str = "meta") -> DecoderModel:
    config = dataclasses.replace(FAMILIES[name], tie_embeddings=False)
    with torch.device(device):
        model: DecoderModel = config.build()
    return model


def names_of(config: FSDPConfig, model: DecoderModel) -> list[str]:
    return [name for unit in config.units(model) for name in unit.modules]


def pytorchs_units(name: str, policies: list[Any]) -> list[set[str]]:
    """Names of the units that FullyShardedDataParallel makes with each policy, without the root."""
    units = []
    for policy in policies:
        model = FullyShardedDataParallel(
            build_model(name, "cpu"),
            auto_wrap_policy=policy,
            device_id=torch.device("cpu"),
        )
        names = [
            unit.replace("_fsdp_wrapped_module.", "")
            .replace("_fsdp_wrapped_module", "")
            .rstrip(".")
            for unit, module in model.named_modules()
            if isinstance(module, FullyShardedDataParallel)
        ]
        units.append({unit for unit in names if unit})
    return units


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("name", FAMILIES)
def test_policies_choose_the_units_of_pytorchs(name: str) -> None:
    """Oracle: FullyShardedDataParallel with ``size_based_auto_wrap_policy`` and
    ``ModuleWrapPolicy``."""
    model = build_model(name)
    kinds = {
        kind.__name__: kind
        for module in model.modules()
        for kind in type(module).__mro__
    }
    classes = [
        names
        for classes in CLASSES
        if (names := [name for name in classes if name in kinds])
    ]
    policies: list[Any] = [
        functools.partial(size_based_auto_wrap_policy, min_num_params=size)
        for size in SIZES
    ]
    policies += [
        ModuleWrapPolicy({kinds[class_name] for class_name in names})
        for names in classes
    ]
    configs = [FSDP2Config(min_params=size) for size in SIZES] + [
        FSDP2Config(wrap_classes=names) for names in classes
    ]
    expected = run_ranks(1, pytorchs_units, name, policies)[0]
    assert [set(names_of(config, model)) for config in configs] == expected
    # The sizes differ in their units
    assert len({len(names) for names in expected}) > len(SIZES) // 2


def test_tied_weights_belong_to_the_root() -> None:
    """Oracle: the names; a weight in two units would be gathered and reduced twice."""
    with torch.device("meta"):
        model = tiny_model(tie_embeddings=True).build()
    assert set(names_of(FSDP1Config(min_params=1), model)).isdisjoint(
        {"embed_tokens", "lm_head"}
    )
    # LMHead derives from Linear
    linear = names_of(FSDP2Config(wrap_classes=["Linear"]), model)
    assert len(linear) == 7 * 3 and all(name.endswith("_proj") for name in linear)
    with pytest.raises(
        ConfigError,
        match="names Embedding, but units of this model can be of the classes Attention, B",
    ):
        names_of(FSDP2Config(wrap_classes=["Embedding"]), model)


class Mixer(nn.Module):
    """A part of a user's own block: a container, attention of PyTorch, and a layer registered
    late."""

    forward_order = ("late", "heads")

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(36, 36), nn.Linear(36, 36)])
        self.pytorchs = nn.MultiheadAttention(36, 6)
        self.late = nn.Linear(36, 36)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input."""
        return hidden


def test_units_of_a_users_model_are_modules_whose_forward_runs_in_its_order() -> None:
    """Oracle: names by hand; PyTorch's attention never calls the forward of its output
    projection."""
    with torch.device("meta"):
        model = tiny_model().build()
        model.layers[0].mlp = Mixer()
    model.layers = model.layers[:1]
    linear = names_of(FSDP2Config(wrap_classes=["Linear", "Mixer"]), model)
    mlp = [name.removeprefix("layers.0.") for name in linear if ".mlp" in name]
    assert mlp == ["mlp", "mlp.late", "mlp.heads.0", "mlp.heads.1"]
    assert inside_out(mlp) == ["mlp.late", "mlp.heads.0", "mlp.heads.1", "mlp"]
    assert "layers.0.mlp.pytorchs" in names_of(
        FSDP1Config(min_params=36 * 36 * 4), model
    )
    for name in (
        "ModuleList",
        "NonDynamicallyQuantizableLinear",
        "RotaryModel",
        "Module",
    ):
        with pytest.raises(ConfigError, match=f"names {name}, but"):
            names_of(FSDP2Config(wrap_classes=[name]), model)


@pytest.mark.parametrize(
    "word", ["parallel.wrap_classes=[Attention,SwiGLU]", "parallel.min_params=2e6"]
)
def test_search_keeps_units_chosen_by_class_or_by_size(word: str) -> None:
    """Oracle: the typed units; every neighbor of a combination validates, and composes from its
    words."""
    overrides = ["model=llama3_1b", "parallel=fsdp2", word]
    base = compose_config(overrides)
    combinations = Combinations(
        base, {"parallel", word.partition("=")[0]}, EVERYTHING, 8, 8
    )
    configs = [
        vary(base, changes)
        for changes in combinations.neighbors(next(combinations.all()), 1, faster=True)
    ]
    with torch.device("meta"):
        model = base.model.build()
    for config in configs:
        assert (
            compose_config([*overrides, *overrides_between(base, config)]).parallel
            == config.parallel
        )
        validate_switches(config, 8, "cuda")
        assert config.parallel.units(model) == base.parallel.units(model)
    assert len(configs) > 1
