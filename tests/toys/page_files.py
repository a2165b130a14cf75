"""Files of docs/toys as modules."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "toys"


def load_file(path: Path) -> ModuleType:
    """Return a file as a module that ``import`` does not find."""
    spec = importlib.util.spec_from_file_location(f"page_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
