"""Makes the environment of these tests: the real torch_npu wheel over the stub of CANN.

``python -m tests.torch_npu.environment FOLDER`` (``bash scripts/torch_npu_env.sh`` calls it) makes
a virtual environment that sees the packages of the running Python and adds three things:
torch_npu's wheel, with the stub's libraries on its search path for CANN's; the host's kernels; and
the unpacked wheel of the oldest supported torch_npu, which is only read. Wheels come through pip,
once.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
NEWEST = "2.13.0"
OLDEST = "2.7.1"
"""Versions of torch_npu: the one that runs, for the torch of the project's tests; and the one only
read."""

SOURCES = ("runtime", "memory", "operators", "reduce", "hccl", "profiler")
LIBRARY = "libascendcl.so"
ALIASES = (
    *("libhccl.so", "libacl_op_compiler.so", "libacl_tdt_channel.so"),
    *("libge_runner.so", "libgraph.so", "libmsprofiler.so", "libascend_hal.so"),
)
"""Further names under which torch_npu's libraries load CANN's."""

CANN_SYMBOL = re.compile(r"(acl|Hccl|Msprof|rt[A-Z])\w+")
ENTRY_POINT = "[torch.backends]\nhost_kernels = host_kernels:install\n"


def make(folder: Path) -> None:
    """Make the environment, unless it was made from the same sources.

    Raises:
        SystemExit: if this Python's torch is not the version required by the wheel.
    """
    try:
        import torch
    except ImportError:
        raise SystemExit(
            f"{sys.executable} has no torch; set PYTHON=/path/to/python"
        ) from None
    if torch.__version__.split("+")[0] != NEWEST:
        raise SystemExit(
            f"torch_npu {NEWEST} wants torch {NEWEST}, and {sys.executable} has {torch.__version__}"
        )
    mark = folder / "made-from"
    if mark.exists() and mark.read_text() == sources():
        return
    packages = {version: unpack(version, folder) for version in (NEWEST, OLDEST)}
    venv.create(folder, symlinks=True)
    site = Path(
        sysconfig.get_path(
            "purelib", "venv", {"base": str(folder), "platbase": str(folder)}
        )
    )
    (site / "shared.pth").write_text(
        f"{sysconfig.get_path('purelib')}\n{packages[NEWEST]}\n"
    )
    build_cann(packages[NEWEST] / "torch_npu")
    build_kernels(site, packages[NEWEST] / "torch_npu")
    mark.write_text(sources())


def unpack(version: str, folder: Path) -> Path:
    """Fetch a wheel of torch_npu with pip and unpack it; returns the folder that holds its
    packages."""
    unpacked = folder / "wheels" / version
    if not unpacked.exists():
        fetched = folder / "wheels" / f"{version}-fetched"
        run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "-d",
                str(fetched),
                f"torch_npu=={version}",
            ]
        )
        part = unpacked.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        for wheel in fetched.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(part)
        part.rename(unpacked)
        shutil.rmtree(fetched)
    return unpacked


def build_cann(package: Path) -> None:
    """Compile the stub, and add a stub by name for each undefined function of torch_npu's
    libraries."""
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-deprecated-declarations"]
    flags += [f"-I{path}" for path in _headers(package)]
    files = [str(HERE / "cann" / f"{name}.cpp") for name in SOURCES]
    library = package / "lib" / LIBRARY
    rest = package / "lib" / "rest.cpp"
    run(["g++", *flags, *files, "-o", str(library)])
    missing = sorted(undefined(package) - defined(library))
    rest.write_text(
        "".join(f'extern "C" int {name}() {{ return 0; }}\n' for name in missing)
    )
    run(["g++", *flags, *files, str(rest), "-o", str(library)])
    for alias in ALIASES:
        link = package / "lib" / alias
        link.unlink(missing_ok=True)
        # copies would be loaded separately, each with its own memory
        link.symlink_to(LIBRARY)


def build_kernels(site: Path, package: Path) -> None:
    """Compile the host's kernels, and have torch load them after torch_npu."""
    from torch.utils.cpp_extension import include_paths, library_paths

    flags = [
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        "-DTORCH_EXTENSION_NAME=_host_kernels",
    ]
    flags += [
        f"-I{path}"
        for path in [
            *include_paths(),
            sysconfig.get_path("include"),
            *_headers(package),
        ]
    ]
    flags += [f"-L{path}" for path in [*library_paths(), package / "lib"]]
    flags += [f"-Wl,-rpath,{package / 'lib'}"]
    libraries = [
        "-ltorch",
        "-ltorch_cpu",
        "-ltorch_python",
        "-lc10",
        "-l:libtorch_npu.so",
    ]
    source = HERE / "kernels/host_kernels.cpp"
    library = site / "_host_kernels.so"
    # takes half a minute
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        run(["g++", *flags, str(source), "-o", str(library), *libraries])
    shutil.copy(HERE / "kernels/host_kernels.py", site)
    facts = site / "host_kernels-0.dist-info"
    facts.mkdir(exist_ok=True)
    (facts / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: host_kernels\nVersion: 0\n"
    )
    (facts / "entry_points.txt").write_text(ENTRY_POINT)


def sources() -> str:
    """A hash of all sources of the environment."""
    digest = hashlib.sha256(f"{sys.executable} {sys.version}".encode())
    for path in sorted(
        [Path(__file__), *(HERE / "cann").iterdir(), *(HERE / "kernels").iterdir()]
    ):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def undefined(package: Path) -> set[str]:
    """CANN's functions that torch_npu's libraries import."""
    libraries = [*(package / "lib").glob("libt*.so"), *package.glob("_C.*.so")]
    symbols = {
        name for library in libraries for name in _symbols(library, "--undefined-only")
    }
    return {name for name in symbols if CANN_SYMBOL.fullmatch(name)}


def defined(library: Path) -> set[str]:
    """Functions that a library defines."""
    return set(_symbols(library, "--defined-only"))


def _headers(package: Path) -> list[Path]:
    return [package / "include", package / "include/third_party/acl/inc"]


def _symbols(library: Path, which: str) -> Sequence[str]:
    listed = subprocess.run(
        ["nm", "-D", which, str(library)], check=True, capture_output=True, text=True
    ).stdout
    return [line.split()[-1].split("@")[0] for line in listed.splitlines()]


def run(command: Sequence[str]) -> None:
    """Print a command, then run it."""
    print("torch_npu environment:", Path(command[0]).name, *command[-1:], flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    make(Path(sys.argv[1]).absolute())
