"""Build the extension with g++: once for each PyTorch, Python and state of the sources, by one
process."""

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[2]
SOURCES = FOLDER / "csrc"
NAME = "simulated_npu_c"
# The build takes its time for reading PyTorch's headers; without optimization a training step takes
# twice as long.
FLAGS = [
    "-shared",
    "-O1",
    "-g0",
    "-std=c++20",
    "-fPIC",
    "-Wno-interference-size",
    f"-DTORCH_EXTENSION_NAME={NAME}",
]


def load_extension() -> Any:
    """The extension's module, for this process alone."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(build_extension()))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def build_extension() -> Path:
    """The extension's library, built if missing for these sources and this PyTorch.

    Raises:
        RuntimeError: with the output of g++.
    """
    build = (
        FOLDER / "build" / f"torch-{torch.__version__}-{sys.implementation.cache_tag}"
    )
    library = (
        build / f"{NAME}-{_digest([*sorted(SOURCES.iterdir()), Path(__file__)])}.so"
    )
    if library.exists():
        return library
    build.mkdir(parents=True, exist_ok=True)
    with open(build / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            started = time.monotonic()
            for path in build.glob("*.so"):
                path.unlink()
            _compile(library)
            seconds = time.monotonic() - started
            print(
                f"simulated_npu: built its extension in {seconds:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return library


def _digest(paths: list[Path]) -> str:
    content = hashlib.sha256()
    for path in paths:
        content.update(path.name.encode() + path.read_bytes())
    return content.hexdigest()[:16]


def _compile(library: Path) -> None:
    # As one translation unit, which reads PyTorch's headers once: a third of the time of ten.
    source = "".join(f'#include "{path}"\n' for path in sorted(SOURCES.glob("*.cpp")))
    root = Path(torch.__file__).parent
    include = root / "include"
    folders = [
        include,
        include / "torch" / "csrc" / "api" / "include",
        Path(sysconfig.get_path("include")),
    ]
    libraries = [
        f"-L{root / 'lib'}",
        *(f"-l{name}" for name in ("c10", "torch", "torch_cpu", "torch_python")),
    ]
    part = library.with_suffix(".part")
    flags = [
        *FLAGS,
        *(f"-I{folder}" for folder in folders),
        "-x",
        "c++",
        "-",
        *libraries,
        "-o",
        str(part),
    ]
    compiler = subprocess.run(
        ["g++", *flags], input=source, capture_output=True, text=True
    )
    if compiler.returncode != 0:
        raise RuntimeError(f"g++ cannot build {library.name}:\n{compiler.stderr}")
    part.replace(library)
