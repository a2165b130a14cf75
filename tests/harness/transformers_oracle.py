"""transformers: its models and files are an oracle of ours."""

import importlib
import sys
from typing import Any

import pytest
import torch

from fsdptoys.models import ModelConfig
from fsdptoys.utils.torchao import torchao_fault


def import_transformers(module: str = "transformers") -> Any:
    """Import transformers, or one of its modules, or skip the test where it is not installed.

    Its models import an installed torchao, which fails where this torch is too old for it. There
    transformers caches that torchao is absent; no model that the tests compare needs it.
    """
    pytest.importorskip("transformers")
    if torchao_fault() is not None:
        from transformers.utils import is_torchao_available

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "torchao", None)
            is_torchao_available.cache_clear()
            assert not is_torchao_available()
    return importlib.import_module(module)


def build_oracle(config: ModelConfig) -> Any:
    """transformers' model of the same configuration, with values far from those of its
    initialization."""
    transformers = import_transformers()
    tree = config.hugging_face.write_config(config)
    torch.manual_seed(0)
    oracle = getattr(transformers, tree["architectures"][0])(
        transformers.AutoConfig.for_model(
            **{key: value for key, value in tree.items() if key != "architectures"}
        )
    )
    for name, param in oracle.named_parameters():
        torch.nn.init.normal_(
            param, 1.0 if name.endswith(("norm.weight", "ln_1.weight")) else 0.0, 0.2
        )
    return oracle
