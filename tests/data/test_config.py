"""The data's configuration as the command line sees it."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

import fsdptoys.data
from fsdptoys.data import DATASETS, DataConfig
from fsdptoys.loss.objective import IGNORE_INDEX

CONFIGS = Path(__file__).parents[2] / "configs" / "data"


@pytest.mark.parametrize("name", DATASETS)
def test_yaml_lists_every_field_with_its_default(name):
    """Oracle: the dataclass, through OmegaConf's structured configs as Hydra composes them."""
    schema = DATASETS[name]
    values = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    assert values.pop("defaults") == [f"base_{name}", "_self_"]
    assert set(values) == {field.name for field in dataclasses.fields(schema)}
    composed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    assert isinstance(composed, DataConfig) and composed == schema()


def test_ignore_index_equals_that_of_the_loss():
    """Oracle: the constant of the loss, which data does not import."""
    assert fsdptoys.data.IGNORE_INDEX == IGNORE_INDEX
