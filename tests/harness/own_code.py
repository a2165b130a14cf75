"""Own code in files, and imports that a test undoes."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from fsdptoys import imports, register
from fsdptoys.cli.new import fill

ROOT = Path(__file__).resolve().parents[2]

COPY_OF_ADAMW = '''
import torch

from fsdptoys import register
from fsdptoys.optim import OptimConfig


@register.optimizer("copied")
class CopiedConfig(OptimConfig):
    """AdamW with the loop over parameters of its paper."""

    beta2: float = 0.95
    """Decay of the mean of squares."""

    @property
    def state_widths(self):
        return (4, 4)

    def build(self, params):
        return torch.optim.AdamW(
            params, lr=self.lr, betas=(0.9, self.beta2), eps=1e-8, foreach=False
        )
'''
"""``optim=copied``, which computes what ``optim=adamw optim.implementation=for_loop`` does."""


def write_code(folder: Path, kinds: Sequence[str] = ()) -> list[str]:
    """Write ``copied.py`` and the files of ``fsdptoys new`` of some kinds, ``own_KIND.py``; return
    the options that import them."""
    files = {"copied": COPY_OF_ADAMW}
    files |= {f"own_{kind}": fill(kind, kind, f"own_{kind}") for kind in kinds}
    options = []
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
        options += ["--import", f"./{name}.py"]
    return options


@contextmanager
def forgotten_imports() -> Iterator[None]:
    """Forget within this process what is imported within this context."""
    restore = register.snapshot()
    modules = set(sys.modules)
    path = list(sys.path)
    with (
        patch.dict(os.environ, {imports.VARIABLE: ""}),
        patch.object(imports, "_loaded", {}),
        patch.object(imports, "_scanned", False),
    ):
        try:
            yield
        finally:
            restore()
            sys.path[:] = path
            for name in set(sys.modules) - modules:
                file = getattr(sys.modules[name], "__file__", None) or ""
                if not file.startswith((sys.prefix, sys.base_prefix, str(ROOT))):
                    del sys.modules[name]
