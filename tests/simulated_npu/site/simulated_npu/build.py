"""Builds the extension with g++, for each PyTorch and Python by itself: what has changed, once for all processes."""

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[2]
SOURCES = FOLDER / "csrc"
NAME = "simulated_npu_c"
# Without optimisation: the time goes into the CPU's kernels, and the build into reading PyTorch's headers.
FLAGS = ["-O0", "-g0", "-std=c++20", "-fPIC", "-Wno-interference-size", f"-DTORCH_EXTENSION_NAME={NAME}"]


def load_extension() -> Any:
    """The extension's module, for this process alone."""
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(build_extension()))
    spec = importlib.util.spec_from_loader(NAME, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def build_extension() -> Path:
    """The extension's library, built where there is none of these sources and this PyTorch.

    Raises:
        RuntimeError: with what g++ says.
    """
    build = FOLDER / "build" / f"torch-{torch.__version__}-{sys.implementation.cache_tag}"
    headers = _digest([*sorted(SOURCES.glob("*.h")), Path(__file__)])
    objects = {path: build / f"{path.stem}-{_digest([path], headers)}.o" for path in sorted(SOURCES.glob("*.cpp"))}
    library = build / f"{NAME}-{_digest([], *(path.name for path in objects.values()))}.so"
    if library.exists():
        return library
    build.mkdir(parents=True, exist_ok=True)
    with open(build / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            started = time.monotonic()
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as workers:
                list(workers.map(_compile, objects.keys(), objects.values()))
            _link(list(objects.values()), library)
            seconds = time.monotonic() - started
            print(f"simulated_npu: built its extension in {seconds:.0f} s", file=sys.stderr, flush=True)
            for path in build.glob("*.*o"):
                if path != library and path not in objects.values():
                    path.unlink()
    return library


def _digest(paths: list[Path], *words: str) -> str:
    content = hashlib.sha256("\n".join(words).encode())
    for path in paths:
        content.update(path.name.encode() + path.read_bytes())
    return content.hexdigest()[:16]


def _compile(source: Path, target: Path) -> None:
    if not target.exists():
        include = Path(torch.__file__).parent / "include"
        folders = [include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include"))]
        _run_compiler([*FLAGS, *(f"-I{folder}" for folder in folders), "-c", str(source)], target)


def _link(objects: list[Path], target: Path) -> None:
    folder = Path(torch.__file__).parent / "lib"
    libraries = [f"-L{folder}", *(f"-l{name}" for name in ("c10", "torch", "torch_cpu", "torch_python"))]
    _run_compiler(["-shared", *map(str, objects), *libraries], target)


def _run_compiler(words: list[str], target: Path) -> None:
    part = target.with_suffix(".part")
    done = subprocess.run(["g++", *words, "-o", str(part)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"g++ cannot build {target.name}:\n{done.stderr}")
    part.replace(target)
