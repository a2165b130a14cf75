"""The data's configuration as the command line sees it."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

import fsdptoys.data
from fsdptoys.data import BinConfig, DataConfig, HFConfig, PreparedConfig, SyntheticConfig, TextConfig
from fsdptoys.loss.objective import IGNORE_INDEX

CONFIGS = Path(__file__).parents[2] / "configs" / "data"


@pytest.mark.parametrize("schema", [SyntheticConfig, TextConfig, BinConfig, PreparedConfig, HFConfig])
def test_yaml_lists_every_field_with_its_default(schema):
    """Oracle: the dataclass, through OmegaConf's structured configs as Hydra composes them."""
    values = yaml.safe_load((CONFIGS / f"{schema.name}.yaml").read_text())
    assert values.pop("defaults") == [f"base_{schema.name}", "_self_"]
    assert set(values) == {field.name for field in dataclasses.fields(schema)}
    composed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    assert isinstance(composed, DataConfig) and composed == schema()


def test_ignore_index_equals_that_of_the_loss():
    """Oracle: the same constant of the memory package, which data does not import."""
    assert fsdptoys.data.IGNORE_INDEX == IGNORE_INDEX
