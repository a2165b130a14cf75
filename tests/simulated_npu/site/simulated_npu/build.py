"""Builds the extension once for each PyTorch and Python, and again when a source changed."""

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[2]
NAME = "simulated_npu_c"


def load_extension() -> Any:
    """The extension's module, for this process alone."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(build_extension()))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def build_extension() -> Path:
    """The extension's library, built where there is none for these sources and this PyTorch."""
    sources = sorted((FOLDER / "csrc").glob("*.cpp"))
    build = FOLDER / "build" / f"torch-{torch.__version__}-{sys.implementation.cache_tag}"
    library, stamp = build / f"{NAME}.so", build / "sources"
    content = hashlib.sha256()
    for path in [*sorted((FOLDER / "csrc").iterdir()), Path(__file__)]:
        content.update(path.name.encode() + path.read_bytes())
    digest = content.hexdigest()
    if not _is_built(library, stamp, digest):
        build.mkdir(parents=True, exist_ok=True)
        with open(build / "build-lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_built(library, stamp, digest):
                stamp.unlink(missing_ok=True)
                started = time.monotonic()
                _compile(sources, build)
                stamp.write_text(digest)
                seconds = time.monotonic() - started
                print(f"simulated_npu: built its extension in {seconds:.0f} s", file=sys.stderr, flush=True)
    return library


def _is_built(library: Path, stamp: Path, digest: str) -> bool:
    return library.exists() and stamp.exists() and stamp.read_text() == digest


def _compile(sources: list[Path], build: Path) -> None:
    from torch.utils import cpp_extension

    flags = ["-O0", "-g0", "-Wno-interference-size"]
    cpp_extension.load(NAME, [str(path) for path in sources], build_directory=str(build), extra_cflags=flags)
