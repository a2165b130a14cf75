"""transformers, whose models and files are an oracle of ours."""

import importlib
import sys
from typing import Any

import pytest

from fsdptoys.utils.torchao import torchao_fault


def import_transformers(module: str = "transformers") -> Any:
    """Import transformers, or one of its modules, or skip the test where it is not installed.

    Its models import an installed torchao, which fails where this torch is too old for it. There transformers caches
    that torchao is absent; no model that the tests compare needs it.
    """
    pytest.importorskip("transformers")
    if torchao_fault() is not None:
        from transformers.utils import is_torchao_available

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "torchao", None)
            is_torchao_available.cache_clear()
            assert not is_torchao_available()
    return importlib.import_module(module)
